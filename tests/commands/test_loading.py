"""A command that works for long says something within a second on a terminal, and what it does next, on any output."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys
import time
from lockstep.base import loading
from lockstep.base.escaping_console import EscapingConsole

loading.begin()
if "speaks" in sys.argv:
    EscapingConsole().print("first")
time.sleep(1.2)
EscapingConsole().print("done")
"""

COLLECTIONS = """
import gc
from pathlib import Path
from lockstep.base import loading
from lockstep.base.escaping_console import EscapingConsole
from lockstep.cli import _common

default = gc.get_threshold()
loading.begin()
Path("lockstep.json").write_text("{}")
_common.recorded(Path("."))  # checks of arguments do not end it
assert gc.get_threshold()[0] == loading.OBJECTS
EscapingConsole().print("first")
assert gc.get_threshold() == default
assert not gc.get_freeze_count()

loading.begin()  # a launcher prints nothing itself
from lockstep.launch.elastic import fork_server
from lockstep.launch.launch_config import LaunchSection
with fork_server.serving((), LaunchSection.model_construct(environment={}, debug=False), threads=1):
    assert gc.get_threshold() == default

import atexit
atexit._run_exitfuncs()
assert gc.get_freeze_count()
"""

SLOW_MODEL = """
import time
from torch import nn


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, batch):
        time.sleep(0.7)
        return self.head(batch["image"].flatten(1) / 255)


def build(options, spec):
    return Slow()
"""


def shown(*command, code=0, **options):
    """What a command writes to its terminal."""
    terminal, other = pty.openpty()
    process = subprocess.Popen([sys.executable, *command], stdin=other, stdout=other, stderr=other, **options)
    os.close(other)
    text = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            text += chunk
    except OSError:  # the process has ended
        pass
    finally:
        os.close(terminal)
    assert process.wait(timeout=30) == code, text
    return text.decode()


def piped(*command, code=0, **options):
    """What a command writes to a pipe."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, timeout=170, **options)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], ["loading", "...", "done"]), (["speaks"], ["first", "done"])],
    ids=["silent", "speaks"],
)
def test_only_silence_is_broken(arguments, words):
    assert shown("-c", SCRIPT, *arguments).split() == words


def test_where_there_is_no_terminal_nothing_is_added():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_no_garbage_is_collected_while_a_command_loads_and_when_it_ends(tmp_path):
    assert piped("-c", COLLECTIONS, cwd=tmp_path) == "first\n"


@pytest.mark.matrix
def test_a_stage_of_a_profile_is_announced_as_it_begins(tmp_path):
    (tmp_path / "model.py").write_text(SLOW_MODEL)
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: user, file: model.py}\n")
    words = ["launch.processes=1", "train.global_batch=1", "train.micro_batch=1"]
    command = [sys.executable, "-m", "lockstep", "profile", "c.yaml", *words, "--steps", "2", "--traced", "1"]
    began, lines = time.monotonic(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        lines = [(time.monotonic() - began, line) for line in process.stdout]
    stages = {text.strip(): seconds for seconds, line in lines for text in re.findall(r"^\[.* s\] (.*) \.\.\.$", line)}
    assert list(stages) == [
        "starting 1 process",
        "warming up: 4 steps",
        "measuring 2 steps",
        "counting operations and memory",
        "tracing 1 step",
    ]
    assert stages["measuring 2 steps"] - stages["warming up: 4 steps"] > 4 * 0.7 / 2  # not all at once


@pytest.mark.matrix
@pytest.mark.parametrize("written", [piped, shown])
def test_every_trial_of_tune_is_announced(tmp_path, written):
    """And the steps of a sweep are counted: it does ten of 0.7 s, and lines come every 5 s."""
    (tmp_path / "model.py").write_text(SLOW_MODEL)
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: user, file: model.py}\n")
    words = ["tune", "c.yaml", "--micro-batch", "--lr", "--steps", "10", "--to", "1e-6", "train.micro_batch=2"]
    options = {"cwd": tmp_path, "env": {**os.environ, "COLUMNS": "150"}}
    # So short a sweep finds no rate.
    text = written("-m", "lockstep", *words, "train.global_batch=2", code=1, **options)
    before, _, after = text.partition("┏")
    assert re.findall(r"^\[ *[0-9.]+ s\] trying train.micro_batch=(\d+) \.\.\.\s*$", before, re.MULTILINE) == ["1", "2"]
    counted = r"(\d+) of 10 steps · [0-9.]+ steps/s · " if written is piped else r" (\d+)/10 [0-9.]+ steps/s "
    assert {int(number) for number in re.findall(counted, after)} & set(range(1, 10)), after


@pytest.mark.matrix
def test_every_measurement_of_estimate_is_announced(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    text = piped("-m", "lockstep", "estimate", "c.yaml", "--world", "1,2", cwd=tmp_path)
    lines = re.findall(r"^\[ *[0-9.]+ s\] (.*) \.\.\.$", text.partition("┏")[0], re.MULTILINE)
    each = ["building the model", "passes of the largest micro-batch", "steps", "each block of the model"]
    tried = [f"steps with {name}" for name in ("fsdp", "pipeline", "ddp", "single")]
    for processes, parts in (("1 process", each), ("2 processes", ["what they send each other", *each])):
        own = [line.partition(": ")[2] for line in lines if line.startswith(f"{processes}: ")]
        assert [part for part in own if part != "steps with tensor"] == ["starting", *parts, "starting", *tried]
