"""`lockstep estimate` on real runs: parts that can be counted are exact, the peak is that of a real training."""

import io
import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
from rich.console import Console
from warmed import warm_launchers

from lockstep.base import plugins
from lockstep.base.errors import ConfigError
from lockstep.base.model_contracts import Batch, LossSum
from lockstep.core.reduction.tree import cover
from lockstep.parallel.forecast import Cluster, checkpoint_copy, partial_sums, sequential_sums
from lockstep.recipe import recipe as recipes
from lockstep.tools.estimate import estimation
from lockstep.tools.estimate.estimation import print_forecasts
from lockstep.tools.estimate.machine_measurement import EstimateOptions, measure
from lockstep.tools.estimate.process_measurement import kept_by_block
from lockstep.tools.trials import world_sizes_of

MIB = 2**20
WIDE = """
import math
from torch import nn


class Wide(nn.Module):
    def __init__(self, pixels, width, classes):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(pixels, width), *(nn.Linear(width, width) for _ in range(5))])
        self.head = nn.Linear(width, classes)

    def forward(self, batch):
        x = batch["image"].flatten(1) / 255
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def build(options, spec):
    return Wide(math.prod(spec.image_shape), options["width"], len(spec.labels))
"""
CONFIG = """
data: {kind: digits}
model: {kind: user, file: my_model.py, options: {width: 1500}}
train: {steps: 4, global_batch: 32, micro_batch: 8}
evaluate: {every_epochs: null, micro_batch: 180}
observe: {sinks: [jsonl]}
"""
WEIGHTS = 4 * (64 * 1500 + 1500 + 5 * (1500 * 1500 + 1500) + 1500 * 10 + 10)
"""Bytes of the model's parameters."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Of the wide model: its recipe, and what one process and two at once have measured."""
    folder = tmp_path_factory.mktemp("estimate")
    (folder / "my_model.py").write_text(WIDE)
    (folder / "c.yaml").write_text(CONFIG)
    recipe = recipes.load(folder / "c.yaml", [f"model.file={folder / 'my_model.py'}"])
    with warm_launchers():
        return recipe, measure(recipe, EstimateOptions(world_sizes=(1, 2), seconds=0.1), report=lambda _: None)


def told(measured, folder, **wish):
    """Rows by (strategy, world), and the JSON."""
    recipe, facts = measured
    console = Console(quiet=True)
    rows = estimation.report(recipe, EstimateOptions(**wish), facts, console=console, to=folder / "e.json")
    return {(row.strategy, row.world_size): row for row in rows}, json.loads((folder / "e.json").read_text())


@pytest.fixture(scope="module")
def whole(measured, tmp_path_factory):
    return told(measured, tmp_path_factory.mktemp("whole"), world_sizes=(1, 2, 4))


def test_parts_that_can_be_counted_are_exact(whole):
    rows, _ = whole
    memory = rows["single", 1].forecast.memory
    assert memory.parameters == WEIGHTS
    assert memory.gradients == 2 * WEIGHTS  # of four shards: the sum of the first two, and the third
    assert 2 * WEIGHTS <= memory.optimizer <= 2 * WEIGHTS + 4 * 14  # a count of steps for each of 14 parameters
    assert 3 * WEIGHTS <= memory.checkpoint <= 3 * WEIGHTS + 4 * 14
    assert rows["ddp", 4].forecast.memory.gradients == WEIGHTS  # one shard each, straight into the buckets
    assert rows["ddp", 2].forecast.memory.communication == WEIGHTS // 2  # the half of the other's buckets that it adds
    assert rows["fsdp", 2].forecast.memory.parameters == WEIGHTS // 2  # every number of rows is even
    assert rows["fsdp", 4].forecast.memory.gradients == pytest.approx(WEIGHTS / 4, rel=1e-3)  # 10 rows: 3 + 3 + 3 + 1
    halves = rows["pipeline", 2].forecast.memory
    assert WEIGHTS / 2 <= halves.parameters < 0.8 * WEIGHTS


def test_the_parts_add_up(whole):
    rows, document = whole
    for row in rows.values():
        if row.forecast:
            memory = row.forecast.memory
            parts = [v for k, v in vars(memory).items() if k != "start"]
            assert all(part >= 0 for part in parts)
            assert memory.step == sum(parts) and memory.peak == max(memory.step, memory.start)
    for row in document["rows"]:
        if row["forecast"]:
            times = dict(row["forecast"]["times"])
            assert times.pop("total") == pytest.approx(sum(times.values()))


def test_json_holds_every_strategy_and_world(whole):
    _, document = whole
    assert {(row["strategy"], row["world"]) for row in document["rows"]} >= {
        (name, world) for name in ("single", "ddp", "fsdp", "pipeline", "tensor") for world in (1, 2, 4)
    }
    for world in (1, 2, 4):
        assert sum(row["is_best"] for row in document["rows"] if row["world"] == world) == 1
    lone = next(row for row in document["rows"] if (row["strategy"], row["world"]) == ("single", 2))
    assert lone["forecast"] is None and "one process" in lone["verdict"]
    assert document["bandwidth"]["source"] == "measured"
    assert document["measured"]["crowded"]["links"]["gather"] > 0


@pytest.mark.parametrize("width", [60, 80, 150])
def test_the_table_fits_the_terminal(whole, width):
    """The totals stay whole; where there is no room for the kinds of memory, a line says so."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    rows = [row for row in whole[0].values() if row.world_size == 2]
    print_forecasts(rows, console)
    lines = text.getvalue().splitlines()
    assert max(len(line) for line in lines if line.startswith(("┃", "│", "┏"))) <= width
    assert "…" not in text.getvalue()
    ddp = whole[0]["ddp", 2]
    line = next(line for line in lines if re.match(r"│ ddp\b", line))
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    headings = [cell.strip() for cell in next(line for line in lines if "PEAK" in line).strip("┃").split("┃")]
    assert cells[headings.index("PEAK")].split()[0] == f"{ddp.peak_bytes / MIB:.0f}"
    assert cells[headings.index("STEP")] == f"{1e3 * ddp.seconds:.1f}"
    assert ("weights" in headings) == (width == 150)
    assert ("a wider terminal shows more" in text.getvalue()) == (width < 150)


def test_traffic(whole):
    """Over sockets: nothing for DDP's shared memory; FSDP's weights twice, its gradients once, for each micro-batch."""
    rows, _ = whole
    assert rows["ddp", 2].forecast.sent_bytes == 0 and rows["ddp", 2].forecast.shared_bytes == WEIGHTS
    assert rows["fsdp", 2].forecast.sent_bytes == 2 * 3 * WEIGHTS // 2
    handed = {0: 0, 1: 4 * 8 * 4 * 1500}  # a cut or none: 4 micro-batches of 8 x 1500 numbers
    assert rows["pipeline", 2].forecast.sent_bytes == handed[1]
    assert rows["pipeline", 1].forecast.sent_bytes == handed[0]


def peak_of_training(folder, world):
    """The largest peak of a process of a training."""
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml", f"launch.processes={world}"]
    launcher, peak = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE), 0
    while launcher.poll() is None:
        with suppress(psutil.Error, OSError):
            for worker in psutil.Process(launcher.pid).children(recursive=True):
                status = Path(f"/proc/{worker.pid}/status").read_text()
                peak = max([peak, *(1024 * int(each) for each in re.findall(r"VmHWM:\s+(\d+)", status))])
        time.sleep(0.02)
    assert launcher.returncode == 0, launcher.stderr.read()
    launcher.stderr.close()
    return peak


@pytest.fixture(scope="module")
def forecasts(tmp_path_factory):
    """Forecasts of memory by (strategy, world), of the command itself: processes that `measured` has forked hold all
    that the tests have imported."""
    folder = tmp_path_factory.mktemp("forecasts")
    (folder / "my_model.py").write_text(WIDE)
    (folder / "c.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "lockstep", "estimate", "c.yaml", "--world", "1,2", "--json", "e.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "e.json").read_text())["rows"]
    return {(row["strategy"], row["world"]): row["forecast"]["memory"] for row in rows if row["forecast"]}


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2])
def test_the_peak_is_that_of_a_real_training(forecasts, tmp_path, world):
    """Within the 15 % that are promised, on DDP, where the model is most of the memory.

    The median of three: the peaks of one and the same training were 654 to 724 MiB.
    """
    (tmp_path / "my_model.py").write_text(WIDE)
    (tmp_path / "c.yaml").write_text(CONFIG)
    peaks = [peak_of_training(tmp_path, world) for _ in range(3)]
    forecast = forecasts["ddp", world]["peak"]
    found = forecast / MIB, [peak / MIB for peak in peaks]
    assert forecast == pytest.approx(median(peaks), rel=0.15), found
    assert min(peaks) > 6 * WEIGHTS


def test_a_device_that_is_too_small(measured, tmp_path):
    rows, document = told(measured, tmp_path, world_sizes=(1,), memory_bytes=200 * MIB)
    assert not any(row.fits or row.is_best for row in rows.values())
    assert "more than 200" in document["rows"][0]["verdict"]


def test_a_stated_bandwidth_is_used(measured, tmp_path):
    """Ten times slower, ten times longer, but for what small messages cost."""
    times = []
    for bandwidth in (1e7, 1e6):
        rows, document = told(measured, tmp_path, world_sizes=(4,), per_machine=1, bandwidth=bandwidth)
        assert document["bandwidth"] == {"bytes_per_second": bandwidth, "source": "stated"}
        assert rows["ddp", 4].forecast.sent_bytes == 2 * 3 * WEIGHTS // 4  # as in a ring
        times.append(rows["fsdp", 4].forecast.times.exchange)
    assert times[1] == pytest.approx(10 * times[0], rel=0.05)


def test_activations_grow_with_the_micro_batch_and_shrink_with_recompute(measured, tmp_path):
    recipe, facts = measured
    alone = facts.alone
    found = []
    for factor, recomputes in ((1, False), (1000, False), (1000, True)):
        blocks = tuple(replace(block, saved_bytes=factor * block.saved_bytes) for block in alone.blocks)
        each = replace(facts, alone=replace(alone, blocks=blocks, recomputes=recomputes))
        rows, _ = told((recipe, each), tmp_path, world_sizes=(1,))
        found.append(rows["single", 1].forecast.memory.activations)
    few, many, recomputed = found
    assert many > few + 100 * sum(block.saved_bytes for block in alone.blocks)
    assert few < recomputed < many


def test_every_strategy_has_a_forecast_and_one_without_is_told():
    for name in plugins.names("parallel.strategies"):
        assert callable(plugins.implementation("parallel.strategies", name, "forecast").forecast)
    with pytest.raises(ConfigError, match="nothing is known of its weather: there is no _ddp_weather.py beside ddp.py"):
        plugins.implementation("parallel.strategies", "ddp", "weather")


def test_tensor_parallelism_divides_what_its_plan_splits(measured, whole, tmp_path):
    """The wide model as if it had a plan: of its six wide layers each process has a half, of the head the whole."""
    rows, _ = whole
    assert "needs a model that says how it can be split" in rows["tensor", 2].verdict
    recipe, facts = measured
    weights = tuple(replace(w, is_split=w.name.startswith("network.layers")) for w in facts.alone.weights)
    alone = replace(facts.alone, weights=weights, unsplittable=None, split_counts={"units": 1500})
    rows, _ = told((recipe, replace(facts, alone=alone)), tmp_path, world_sizes=(1, 2, 4, 7))
    head = 4 * (1500 * 10 + 10)
    for world in (1, 2, 4):
        forecast = rows["tensor", world].forecast
        assert forecast.memory.parameters == (WEIGHTS - head) // world + head
        assert forecast.sent_bytes == (
            2 * (world - 1) / world * 4 * 4 * (6 * 8 * 4 * 1500 + 8 * 4 * 10) if world > 1 else 0
        )
    assert "7 processes do not divide the 1500 units" in rows["tensor", 7].verdict


def two_layers():
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

        def forward(self, batch: Batch):
            return self.last(self.first(batch["x"]).relu())

        def loss(self, outputs, batch: Batch):
            return LossSum(outputs.square().sum(), len(outputs))

        def blocks(self):
            return [self.first, self.last]

    return Network()


@pytest.mark.parametrize("samples", [4, 8])
def test_what_is_kept_of_a_micro_batch_grows_with_it(samples):
    """The first layer keeps its inputs, which are the batch's own; ReLU its result, which is the last layer's input, on
    the way to it; the last block's outputs are kept by the loss."""
    kept = kept_by_block(two_layers(), {"x": torch.ones(samples, 16)}, lambda: torch.autocast("cpu", enabled=False))
    assert kept == [(0, 4 * 32 * samples), (4 * (32 + 4) * samples, 4 * 4 * samples)]


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 8, 16])
def test_partial_sums_are_as_many_as_the_tree_says(shards):
    every = frozenset(range(shards))
    found = sequential_sums(every, every)
    assert found.most <= max(1, (shards - 1).bit_length())
    assert found.after[-1] == 1
    assert partial_sums((tuple(range(shards)),), every, cover(every, every)).after == (1,)


def test_a_checkpoint_is_shared_out():
    tensors = {"a": 100, "b": 60, "c": 40}
    assert checkpoint_copy(tensors, 1) == 200
    assert checkpoint_copy(tensors, 2) == 100
    assert checkpoint_copy(tensors, 8) == 100


def test_processes_beyond_the_cores_share_them():
    cluster = Cluster(world=8, per_machine=4, slots=2, links=None, bandwidth=None)
    assert cluster.machines == 2
    assert cluster.slowdown == 2.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world", "1,two"], "--world 1,two: give numbers of processes"),
        (["--world", "0"], "--world 0: give numbers of processes"),
        (["--memory", "-3"], "--memory: -3e+09 is not more than 0"),
        (["--memory", "inf"], "less than or equal to"),
        (["--bandwidth", "nan"], "less than or equal to"),
        (["--bandwidth", "0"], "--bandwidth: 0 is not more than 0"),
        (["--json", "nowhere/e.json"], "there is no folder nowhere"),
        (["parallel.kind=dpp"], "did you mean 'ddp'"),
    ],
)
def test_a_mistake_is_one_message(tmp_path, capsys, monkeypatch, arguments, words):
    from lockstep.cli._app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    with pytest.raises(SystemExit) as left:
        app(["estimate", "c.yaml", *arguments])
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert words in said and "Traceback" not in said


def test_worlds_are_numbers():
    assert world_sizes_of("4,1,4") == (4, 1)
    with pytest.raises(ConfigError):
        world_sizes_of("")
