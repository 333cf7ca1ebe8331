"""Errors that a user's code raises: one message with the user's own lines, whatever is raised, and wherever."""

import pytest
from members import further
from running import lockstep

from lockstep.base import user_code

FILE = """
import multiprocessing
import subprocess
import sys
import threading
import time

import numpy as np
import torch
from torch import nn


def deep(number):
    return deeper(number + 1)


def deeper(number):
    return deep(number + 1)


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


def fault(kind):
    if kind == "raise":
        raise ValueError("torn \\x1b[31m page")
    if kind == "recursion":
        deep(0)
    if kind == "memory":
        np.zeros(10**13, np.uint8).sum()
    if kind == "end of file":
        raise EOFError("end")
    if kind == "ctrl-c":
        raise KeyboardInterrupt
    if kind == "exit":
        sys.exit(0)
    if kind == "pipe":
        raise BrokenPipeError(32, "Broken pipe of mine")
    if kind == "unspeakable":
        raise Unspeakable
    if kind == "long":
        raise ValueError("x" * 100_000)
    if kind == "chain":
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error


class Network(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.linear, self.options = nn.Linear(64, 10), options

    def forward(self, batch):
        if self.training and self.options["where"] == "forward":
            fault(self.options["fault"])
        return self.linear(batch["image"].flatten(1).float())


def build(options, spec):
    if options["where"] == "left process":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
    if options["where"] == "left command":
        subprocess.Popen(["sleep", "1000"])
    if options["where"] == "left thread":
        threading.Thread(target=time.sleep, args=(1000,)).start()
    if options["where"] == "build":
        fault(options["fault"])
    if options["where"] == "layers":
        return nn.Sequential(Rows(), nn.Linear(3, 10))
    return Network(options)


class Rows(nn.Module):
    def forward(self, batch):
        return batch["image"].flatten(1).float()
"""
CONFIG = """
data: {kind: digits, limit: 40}
model: {kind: user, file: mine.py, options: {where: WHERE, fault: FAULT}}
train: {steps: 2, global_batch: 10, micro_batch: 5}
run: {name: a}
observe: {sinks: [progress]}
"""
SAID = {
    "raise": "ValueError: torn \\x1b[31m page",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "memory": "Unable to allocate 9.09 TiB",
    "end of file": "EOFError: end",
    "ctrl-c": "KeyboardInterrupt",
    "exit": "SystemExit: 0",
    "pipe": "BrokenPipeError: [Errno 32] Broken pipe of mine",
    "unspeakable": "Unspeakable: <exception str() failed>",
    "long": "ValueError: xxxx",
    "chain": "KeyError: 'first'",
}


@pytest.fixture
def train(commands, tmp_path):
    """A training in one process -> how it was answered."""

    def answered(where, fault="none", file=FILE):
        (tmp_path / "mine.py").write_text(file)
        (tmp_path / "c.yaml").write_text(CONFIG.replace("WHERE", where).replace("FAULT", fault))
        return commands.answer(["worker", "c.yaml"], folder=tmp_path, seconds=60)

    return answered


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("build", "chain"),
        *(("forward", each) for each in SAID),
        *further(*(("build", each) for each in SAID if each != "chain")),
    ],
)
def test_whatever_is_raised_is_told_in_the_users_lines(train, where, fault):
    found = train(where, fault)
    assert (found.kind, found.code) == ("message", 1), found.output
    what = {"build": "while the model was built", "forward": "in the forward pass"}[where]
    lines = found.output.splitlines()
    start = lines.index(f"model.file: mine.py failed {what}:")
    assert all(line.startswith("  | ") for line in lines[start + 1 :]), found.output
    assert any(SAID[fault] in line for line in lines), found.output
    assert not [line for line in lines if "File " in line and "mine.py" not in line and "numpy" not in line]
    assert len(lines) < 100 and max(map(len, lines[start:])) < 1100


def test_layers_that_do_not_fit_together(train):
    found = train("layers")
    assert (found.kind, found.code) == ("message", 1), found.output
    assert "mat1 and mat2 shapes cannot be multiplied" in found.output


BROKEN = {
    "syntax": ("def build(:\n", "SyntaxError"),
    "half a line": ("x = (1,\n", "SyntaxError"),
    "name": ("nothing_of_this_name\n", "NameError"),
    "import": ("import nothing_of_this_name\n", "ModuleNotFoundError"),
    "exit": ("import sys\nsys.exit('bye')\n", "SystemExit: bye"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cannot_be_imported(train, case):
    text, said = BROKEN[case]
    found = train("build", file=text)
    assert (found.kind, found.code) == ("message", 1), found.output
    assert "model.file: mine.py failed while it was imported:\n  | " in found.output
    assert said in found.output


@pytest.mark.parametrize("where", ["left command", "left thread", *further("left process")])
def test_what_is_left_behind_is_not_waited_for(tmp_path, where):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("WHERE", where).replace("FAULT", "none"))
    done = lockstep(tmp_path, "train", "c.yaml", "launch.processes=1")
    assert done.returncode == 0, done.stderr
    what = "thread Thread-" if where == "left thread" else "process "
    assert f"ended, since your code has started and not ended it: {what}" in done.stderr
    assert ("(sleep 1000)" in done.stderr) == (where == "left command")


DATA = """
import sys

import numpy as np

from lockstep.data.in_memory import Images


class Source(Images):
    def __getitems__(self, indices):
        if 7 in indices and not self.is_test:
            raise {error}
        return super().__getitems__(indices)


def source(options, split):
    made = Source(np.zeros((40, 1, 8, 8), np.uint8), np.arange(40) % 2, ["even", "odd"])
    made.is_test = split == "test"
    return made
"""


@pytest.mark.parametrize("error", ["SystemExit(0)", "KeyboardInterrupt", "KeyError('gone')"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_raises_names_the_sample(commands, tmp_path, error, workers):
    (tmp_path / "data.py").write_text(DATA.replace("{error}", error))
    config = "data: {kind: user, file: data.py, workers: WORKERS}\nmodel: {kind: cnn}\nrun: {name: a}\n".replace(
        "WORKERS", str(workers)
    )
    (tmp_path / "c.yaml").write_text(config + "train: {epochs: 1, global_batch: 10, micro_batch: 5}\n")
    found = commands.answer(["worker", "c.yaml"], folder=tmp_path, seconds=60)
    assert (found.kind, found.code) == ("message", 1), found.output
    assert error.partition("(")[0] in found.output
    if workers or error != "KeyboardInterrupt":
        assert "sample 7 of the training split of data.kind=user could not be fetched" in found.output


def test_the_places_that_call_a_users_code_are_there():
    for file, function in [*user_code.CALL_SITES, user_code.IMPORT]:
        assert f"def {function}(" in (user_code.ROOT / file).read_text(), (file, function)


def test_packages_of_an_environment_below_this_one_are_libraries():
    assert not user_code.Frame("/elsewhere/lib/python3.11/site-packages/torch/nn/modules/module.py", "forward").is_users
    assert user_code.Frame("/elsewhere/mine.py", "forward").is_users


def test_what_torch_has_compiled_is_not_the_users_code():
    assert not user_code.Frame("/tmp/torchinductor_me/ab/cab.py", "call").is_users
    assert user_code.Frame("/home/me/model.py", "forward").is_users
