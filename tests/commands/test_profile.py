"""`lockstep profile` and observe.profile_steps: the table adds up, planted faults are named, traces can be opened."""

import gzip
import io
import json
import re
import tempfile

import pytest
import torch
from rich.console import Console
from running import lockstep, summary

from lockstep.core.host.phases import OF_STEPS
from lockstep.observe.profile.operators import caller
from lockstep.observe.profile.step_trace import traced
from lockstep.recipe import recipe as recipes
from lockstep.tools.profile.profiling import RankProfile, advice, time_table

MINE = """
import os
import time

import torch
from torch import nn

from lockstep.core.reduction import transport
from lockstep.data.sources import _digits as digits

RANK = os.environ.get("RANK")


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.layers, self.fault = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 10)), fault

    def forward(self, batch):
        if self.fault == "slow rank" and RANK == "1":
            time.sleep(0.02)
        return self.layers(batch["image"].flatten(1) / 255)


class Slow:
    def __init__(self, plain, fault):
        self.plain, self.fault, self.spec, self.lengths = plain, fault, plain.spec, None

    def __len__(self):
        return 512 * 64  # no step is smaller than the others

    def __getitems__(self, indices):
        if self.fault == "slow loader" or self.fault == "slow loader of a rank" and RANK == "1":
            time.sleep(0.02)
        return self.plain.__getitems__([index % len(self.plain) for index in indices])


def source(options, split):
    return Slow(digits.build(digits.Config(kind="digits"), split), options["fault"])


def build(options, spec):
    if options["fault"] == "slow exchange":
        for kind in (transport.NetworkTransport, transport.SharedMemoryTransport):
            kind.sum = delayed(kind.sum)
    return Model(options["fault"])


def delayed(plain):
    def slow(*arguments):
        time.sleep(0.2)  # far more than what another test takes from a rank now and then
        return plain(*arguments)

    return slow
"""
CONFIG = """
data: {kind: user, file: mine.py, options: {fault: none}}
model: {kind: user, file: mine.py, options: {fault: none}}
train: {steps: 60, global_batch: 64, micro_batch: 16}
launch: {processes: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    (folder / "mine.py").write_text(MINE)
    (folder / "c.yaml").write_text(CONFIG)
    return folder


def profiled(folder, *settings):
    """The facts, and what was printed."""
    done = lockstep(folder, "profile", "c.yaml", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "profile" / "profile.json").read_text()), done.stdout


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("fsdp", "pipeline"))]
)
def test_the_phases_add_up_to_the_step(folder, kind):
    sizes = ("train.global_batch=512", "train.micro_batch=128")  # the products take most of the time, not the copies
    facts, printed = profiled(folder, f"parallel.kind={kind}", *sizes, "--steps", "10")
    assert [each["rank"] for each in facts["ranks"]] == [0, 1]
    for each in facts["ranks"]:
        assert sum(each["phases"][name] for name in OF_STEPS) == pytest.approx(each["step_seconds"], rel=0.05)
        assert each["phases"]["evaluation"] == each["phases"]["saving"] == 0
        assert min(each["memory"].values()) > 0
    operations = sum(each["flops"] for each in facts["ranks"])
    assert operations == pytest.approx(512 * 2 * (2 * 64 * 600 + 3 * 600 * 10), rel=0.01)  # no gradient of the images
    assert re.search(r"^step +\d+\.\d\d +100% ", printed, re.MULTILINE)
    assert re.search(r"^[123]\. \w+: \d+\.\d\d ms in \d+ calls a step, \S*mine.py:\d+ forward", printed, re.MULTILINE)
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((folder / "profile" / f"trace-rank-{rank}.json.gz").read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"phase: forward", "phase: exchange", "phase: optimizer", "aten::addmm"} <= names


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "slow loader", r"\d\d% of a step is waiting for data: raise data.workers", marks=pytest.mark.matrix
        ),
        pytest.param(
            "slow loader of a rank",
            r"Rank 1 keeps the others waiting, \d+\.\d ms in each step: it waits for its data",
            marks=pytest.mark.matrix,
        ),
        (
            "slow rank",
            r"Rank 1 keeps the others waiting, \d+\.\d ms in each step: it takes \d+\.\d ms longer in forward",
        ),
        pytest.param(
            "slow exchange",
            r"\d\d% of a step is the exchange between ranks, and all of them wait for it",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_planted_fault_is_named(folder, fault, said):
    both = [f"{section}.options.fault={fault}" for section in ("data", "model")]
    facts, printed = profiled(folder, *both, "--steps", "6")
    assert re.search(said, printed), printed
    assert re.search(said, facts["advice"])


@pytest.mark.matrix
def test_fewer_processes_leave_no_trace_of_others(folder):
    profiled(folder, "--steps", "2")
    profiled(folder, "--steps", "2", "launch.processes=1")
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["profile.json", "trace-rank-0.json.gz"]


def test_mistakes_are_one_message(folder):
    (folder / "file").touch()
    for arguments, words in (
        (["--to", "file"], "--to file: cannot be written (File exists); name another folder"),
        (["train.stepps=3"], "did you mean"),
        (["observe.profile_steps=[5, 3]"], "should be the first and the last step, such as [100, 105]"),
    ):
        done = lockstep(folder, "profile", "c.yaml", *arguments)
        assert done.returncode == 2
        assert words in done.stderr and "Traceback" not in done.stderr


def test_a_trace_is_written_where_only_this_user_may_write(tmp_path, monkeypatch):
    """Not beside a file in the folder for temporary files of all users, as PyTorch packs traces."""
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", None)
    with traced(tmp_path / "trace.json.gz", with_stack=False):
        torch.ones(3) + 1
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


@pytest.mark.core
def test_steps_of_a_training_are_traced(folder):
    """On every rank, with the same weights as without."""
    for name, settings in (("plain", []), ("traced", ["observe.profile_steps=[10, 12]"])):
        done = lockstep(folder, "train", "c.yaml", f"run.name={name}", "train.steps=20", *settings)
        assert done.returncode == 0, done.stderr
    assert summary(folder, "traced")["digest"] == summary(folder, "plain")["digest"]
    traces = sorted((folder / "runs" / "traced" / "profile").iterdir())
    assert [path.name for path in traces] == ["trace-rank-0.json.gz", "trace-rank-1.json.gz"]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "phase: optimizer" for event in events) == 3


def test_steps_to_trace_are_part_of_no_numeric_recipe(folder):
    plain, traced = (
        recipes.numeric_recipe(recipes.load(folder / "c.yaml", settings), {})
        for settings in ([], ["observe.profile_steps=[1, 2]"])
    )
    assert plain == traced


def rank(number, *, peak_flops=1e11, delayed=0.0, **phases):
    return RankProfile(
        rank=number,
        step_seconds=sum(phases.values()),
        phases={**dict.fromkeys((*OF_STEPS, "evaluation", "saving"), 0.0), **phases},
        hidden_seconds=0.0,
        delayed_seconds=delayed,
        micro_batches=4,
        peak_bytes=1,
        flops=1e9,
        peak_flops=peak_flops,
        memory={},
        operators=[],
    )


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([rank(0, forward=0.01, backward=0.02)], "reach 33% of what|own products"),
        (
            [rank(0, forward=0.05, backward=0.1)],
            "The passes reach 7% of what matrix products can: larger micro-batches",
        ),
        ([rank(0, forward=0.01, optimizer=0.01)], "50% of a step is the optimizer"),
        ([rank(0, forward=0.01, other=0.01)], "50% of a step is bookkeeping: raise observe.log_every"),
        (
            [rank(0, forward=0.02, exchange=0.0), rank(1, forward=0.01, exchange=0.01)],
            "Rank 0 keeps the others waiting",
        ),
        ([rank(0, forward=0.01, exchange=0.02), rank(1, forward=0.01, exchange=0.02)], "67% of a step is the exchange"),
        ([rank(0, data=0.05, exchange=0.05), rank(1, data=0.07, exchange=0.03)], "60% of a step is waiting for data"),
        (
            [rank(0, forward=0.01, exchange=0.04), rank(1, delayed=0.01, forward=0.05)],
            "it takes 40.0 ms longer in forward",
        ),
        (
            [rank(0, forward=0.01, exchange=0.04), rank(1, delayed=0.03, forward=0.05)],
            "other processes have its core for 30.0 ms of a step",
        ),
    ],
)
def test_the_advice_follows_from_the_numbers(measured, said):
    assert re.search(said, advice(measured, is_equal=True))


def test_a_slow_stage_of_a_pipeline_is_one_of_its_cut():
    measured = [rank(0, forward=0.02), rank(1, forward=0.01, exchange=0.01)]
    assert advice(measured, is_equal=False).endswith("parallel.cut can move blocks to other stages.")


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_fits(width):
    text = io.StringIO()
    Console(file=text, width=width).print(time_table([rank(0, forward=0.02), rank(1, forward=0.01, exchange=0.01)]))
    assert max(map(len, text.getvalue().splitlines())) <= width
    assert "…" not in text.getvalue()


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (
            ["<built-in function linear>", "torch/nn/modules/linear.py(130): forward", "mine.py(7): forward"],
            "mine.py:7 forward",
        ),
        (
            ["lockstep/parallel/micro_batches.py(1): run", "lockstep/models/_cnn.py(23): forward"],
            "lockstep/models/_cnn.py:23 forward",
        ),
        (
            ["transformers/models/bert/modeling_bert.py(300): forward"],
            "transformers/models/bert/modeling_bert.py:300 forward",
        ),
        (["torch/autograd/graph.py(966): _engine_run_backward"], ""),
        (["contextlib.py(137): __enter__"], ""),
        ([], ""),
    ],
)
def test_the_line_of_an_operator_is_not_pytorchs(stack, line):
    assert caller(stack) == line
