"""A checkpoint of any strategy and any number of processes goes on under any other; models larger than a process."""

import ctypes
import gc
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from strategy_runs import CPU, prepared
from torch import nn

from lockstep.base.model_contracts import LossSum, MicroBatch, Model
from lockstep.checkpoint.layout import Manifest, folder_of, read_manifest
from lockstep.checkpoint.reader import load
from lockstep.checkpoint.writer import Writer
from lockstep.core.distributed.process_group import world_group
from lockstep.core.modules.deferred_init import deferred
from lockstep.core.numerics.digest import digest_of, world_lines
from lockstep.core.numerics.seeds import seed_all
from lockstep.recipe import build as assembly
from lockstep.recipe import recipe as recipes
from lockstep.training.step import step

MIB = 1 << 20
LEGS = [
    ("ddp", 4, {}),
    ("fsdp", 2, {}),
    ("pipeline", 2, {"stages": 2}),
    ("fsdp", 4, {"replicas": 2}),
    ("pipeline", 4, {"stages": 2, "schedule": "gpipe"}),
    ("single", 1, {}),
]


def digest_on(state):
    return digest_of(world_lines(state.tensors(), world_group()))


def saved(state, folder):
    writer = Writer(folder, copies=state.strategy.copies)
    manifest = Manifest(step=state.step, epoch=0, world_size=1, saved_at=0.0, numeric={}, progress=state.state_dict())
    writer.start(state.tensors(), manifest)
    assert writer.finished().failure is None
    return read_manifest(folder_of(folder, state.step)).digest


def leg(task, kind, config, folder, steps):
    """Go on from a checkpoint for some steps, and save -> digest over everything, and the manifest's over the weights."""
    state, fetched, _ = prepared(task, kind, config, {})
    if steps.start:
        checkpoint = folder_of(folder, steps.start)
        load(checkpoint, state.tensors())
        state.load_state_dict(dict(read_manifest(checkpoint).progress))
    for micro_batches in fetched(state.strategy.owned, steps.start, steps.stop).steps():
        step(state, micro_batches, clip=0.5)
    return digest_on(state), saved(state, folder), digest_of(world_lines(state.strategy.state(), world_group()))


def undisturbed(task):
    """One process with the whole model -> after every leg, the digests over everything and over the weights."""
    state, fetched, _ = prepared(task, "single", {}, {})
    found = []
    for number, micro_batches in enumerate(fetched(state.strategy.owned, 0, 2 * len(LEGS)).steps()):
        step(state, micro_batches, clip=0.5)
        if number % 2:
            found.append((digest_on(state), digest_of(world_lines(state.strategy.state(), world_group()))))
    return found


@pytest.mark.parametrize("task", ["images", pytest.param("texts", marks=pytest.mark.matrix)])
def test_a_run_goes_through_every_strategy(ranks, tmp_path, task):
    (expected,) = ranks(1, undisturbed, task)
    for number, ((kind, world, config), (everything, weights)) in enumerate(zip(LEGS, expected, strict=True)):
        found = ranks(world, leg, task, kind, config, tmp_path, range(2 * number, 2 * number + 2))
        assert set(found) == {(everything, weights, weights)}, (kind, world)


@pytest.mark.matrix
def test_the_command_goes_through_every_strategy(tmp_path):
    """In mid-epoch each time (23 steps an epoch), with evaluation, and the same command but for the strategy."""

    def train(name, steps, kind, processes):
        settings = {"run.dir": tmp_path, "run.name": name, "train.steps": steps, "schedule.shape": "constant"}
        settings |= {"schedule.warmup": 5}
        settings |= {"parallel.kind": kind, "launch.processes": processes, "train.epochs": "null"}
        command = [sys.executable, "-m", "lockstep", "train", "examples/digits.yaml"]
        command += [f"{key}={value}" for key, value in settings.items()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / name / "summary.json").read_text())

    whole = train("whole", 36, "single", 1)
    for steps, kind, processes in ((9, "ddp", 4), (18, "fsdp", 2), (27, "pipeline", 2), (36, "single", 1)):
        chain = train("chain", steps, kind, processes)
    assert [chain[key] for key in ("digest", "chain", "evaluation")] == [
        whole[key] for key in ("digest", "chain", "evaluation")
    ]


SPREAD = {"fsdp": {}, "pipeline": {"cut": [6]}}
"""Halves of the model below; a cut by measured time need not be one on a busy machine."""


class Large(Model):
    """192 MiB of weights in twelve layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(12)])
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return x

    def loss(self, outputs, batch):
        return LossSum(outputs.square().sum(), len(outputs))

    def blocks(self):
        return list(self.layers)


def placed(kind, config, *, is_deferred=True):
    def build():
        seed_all(1)
        return Large()

    batch = {"x": torch.ones(2, 2048)}
    model = deferred(build) if is_deferred else build()
    recipe = recipes.Recipe.model_validate({"parallel": {"kind": kind, **config}})
    state = assembly.distribute(recipe, model, lambda: batch, total_steps=9, device=CPU)
    return state, batch


def initial_on_rank(kind, config, is_deferred):
    state, _ = placed(kind, config, is_deferred=is_deferred)
    return digest_of(world_lines(state.strategy.state(), world_group()))


def test_a_model_without_memory_gets_the_weights_of_a_plain_build(ranks):
    ((plain),) = ranks(1, initial_on_rank, "single", {}, False)
    for kind in ("fsdp", "pipeline"):
        assert set(ranks(2, initial_on_rank, kind, {}, True)) == {plain}, kind


def peak(reset):
    """Largest resident set of this process so far, in bytes; `reset` begins anew."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def loading_on_rank(kind, config, folder):
    """Bytes of the state that this rank holds, and of memory that loading took besides."""
    state, _ = placed(kind, config)
    tensors = state.tensors()
    if dist.get_world_size() == 1:
        saved(state, folder)
        return 0, 0
    held = sum(t.nbytes for t in (*state.module.parameters(), *_moments(state)))
    before = peak(reset=True)
    load(folder_of(folder, 0), tensors)
    return held, peak(reset=False) - before


def _moments(state):
    return [t for values in state.optimizer.state.values() for t in values.values()]


def test_loading_takes_little_more_than_what_is_loaded(ranks, tmp_path):
    """A checkpoint of one process, 576 MiB: on W processes each holds 1/W of it, and 20 % more while it is read."""
    ranks(1, loading_on_rank, "fsdp", {}, tmp_path)
    for kind, config in SPREAD.items():
        for held, extra in ranks(2, loading_on_rank, kind, config, tmp_path):
            assert held == pytest.approx(288 * MIB, rel=0.01)
            assert extra <= 0.2 * held, (kind, extra / MIB)


def limited_on_rank(kind, config, limit):
    """Train two steps with so many bytes of memory beyond what the process has now."""
    resource = pytest.importorskip("resource")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would not count
    with open("/proc/self/status") as file:
        now = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + limit, before[1]))
    try:
        state, batch = placed(kind, config, is_deferred=kind != "ddp")
        every = frozenset(range(4))
        for number in range(2):
            shards = state.strategy.owned(4, every)
            micro_batches = [
                MicroBatch(
                    step=number, shard=s or 0, ghost=s is None, indices=(0, 1), batch=batch, shards=4, present=every
                )
                for s in shards
            ]
            step(state, micro_batches, clip=1.0)
        return digest_of(world_lines(state.strategy.state(), world_group()))
    except (RuntimeError, MemoryError) as error:
        return "out of memory" if "alloc" in str(error) or "memory" in str(error) else repr(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.matrix
def test_a_model_that_is_too_large_for_a_process(ranks):
    """Weights, gradients and moments of 768 MiB, where each of two processes may take 600."""
    limit = 600 * MIB
    assert set(ranks(2, limited_on_rank, "ddp", {}, limit)) == {"out of memory"}
    fsdp, pipeline = (set(ranks(2, limited_on_rank, kind, config, limit)) for kind, config in SPREAD.items())
    assert len(fsdp) == 1
    assert fsdp == pipeline != {"out of memory"}
