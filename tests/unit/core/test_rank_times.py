"""Where the time of each rank goes: phases, what is gathered of all ranks, and the rank that others wait for."""

import json
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lockstep.base.events import RankTimes, Warned
from lockstep.base.world import World
from lockstep.core.host import phases
from lockstep.core.host.activity import SAVE, waiting_in
from lockstep.core.host.phases import PHASES, phase
from lockstep.core.host.signals import SignalWatch
from lockstep.observe.diagnose.stragglers import Stragglers
from lockstep.parallel.fsdp_units import mark_waits
from lockstep.recipe.recipe import Recipe
from lockstep.run.tasks.train import TrainTask

MODEL = """
import os
import time

import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = nn.Linear(64, 10), seconds

    def forward(self, batch):
        time.sleep(self.seconds)
        return self.layer(batch["image"].flatten(1) / 255)


def build(options, spec):
    return Model(options.get("seconds", 0.0) if os.environ.get("RANK") == "1" else 0.0)
"""


@pytest.fixture
def clock():
    yield phases.start()
    phases.stop()


def test_each_moment_counts_once_for_the_innermost_phase(clock):
    earliest, begun, latest = time.perf_counter(), clock.so_far(), time.perf_counter()
    with phase("backward"):
        time.sleep(0.02)
        with waiting_in("the gradient exchange"):
            time.sleep(0.03)
        moment = time.perf_counter()
        time.sleep(0.01)
    time.sleep(0.01)
    phases.move_end(moment, "backward", "exchange")
    with phase("evaluation"), phase("forward"), waiting_in("a gather"):
        time.sleep(0.01)
    with waiting_in(SAVE):
        time.sleep(0.01)
    before, measured, after = time.perf_counter(), clock.so_far() - begun, time.perf_counter()
    seconds = measured.phases
    assert before - latest - 1e-6 <= sum(seconds.values()) <= after - earliest + 1e-6
    assert seconds["exchange"] >= 0.04
    assert seconds["backward"] >= 0.02
    assert seconds["other"] >= 0.01  # what follows a phase is no part of its end
    assert (seconds["forward"], seconds["data"]) == (0.0, 0.0)
    assert min(seconds["evaluation"], seconds["saving"]) >= 0.01
    assert measured.delayed >= 0
    assert 0 <= sum((clock.so_far() - begun - measured).phases.values()) <= time.perf_counter() - before


def test_other_threads_do_not_count(clock):
    def wait():
        with waiting_in("the gradient exchange"):
            time.sleep(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    with phase("forward"):
        thread.join()
    measured = clock.so_far()
    assert measured.phases["exchange"] == 0.0
    assert measured.phases["forward"] >= 0.04
    assert measured.background >= 0.04


def waits_of_fsdp():
    """The phases in a forward and backward pass of a layer whose waits are marked."""
    entered = []

    @contextmanager
    def note(name):
        entered.append(name)
        yield

    layer = fully_shard(nn.Linear(4, 4))
    mark_waits(layer)
    phases.start()
    with phases.annotated(note):
        layer(torch.ones(2, 4)).sum().backward()
    phases.stop()
    return entered


def test_computation_that_waits_for_fsdps_streams_counts_as_exchange(ranks):
    """Marked on GPUs only, where the streams differ: in the forward pass, after a block's backward, at the end."""
    entered = ranks(2, waits_of_fsdp)[0]
    assert len(entered) >= 3
    assert set(entered) == {"exchange"}


class Events:
    """Keeps what was published."""

    def __init__(self):
        self.found = []

    def notice(self, event):
        self.found.append(event)

    def close(self):
        pass


def train_there(recipe, variables):
    """A run in warm processes -> its events on rank 0, and its wall time in steps."""

    class Watched(TrainTask):
        def starting(self, training):
            self.events = Events()
            self.bus.subscribe(self.events)
            self.bus.subscribe(Stragglers(self.bus.publish, window_seconds=0.2))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setenv("RANK", str(dist.get_rank()))
        world = World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=dist.get_rank())
        task = Watched(recipe, world, SignalWatch())
        task.run("never", allow_drift=False)
        task.close()
    phases.stop()
    return [event for event in task.events.found if isinstance(event, RankTimes | Warned)] if world.is_main else []


def recipe_of(folder, kind="ddp", **options):
    (folder / "model.py").write_text(MODEL)
    return Recipe.model_validate(
        {
            "run": {"dir": folder, "name": "r"},
            "data": {"kind": "digits", "limit": 320},
            "model": {"kind": "user", "file": folder / "model.py", "options": options},
            "train": {"steps": 24, "global_batch": 32, "micro_batch": 8},
            "parallel": {"kind": kind},
            "observe": {"sinks": ["jsonl"], "log_every": 4},
            "evaluate": {"every_epochs": 1},
        }
    )


@pytest.mark.parametrize(("kind", "processes"), [("ddp", 1), ("ddp", 3), ("fsdp", 2)])
def test_all_ranks_times_are_gathered_on_logged_steps(ranks, tmp_path, kind, processes):
    """Every moment of the loop is in one of the phases, and every micro-batch is counted."""
    began = time.perf_counter()
    events = ranks(processes, train_there, recipe_of(tmp_path, kind), {})[0]
    wall = time.perf_counter() - began
    times = [event for event in events if isinstance(event, RankTimes)]
    assert [each.step for each in times] == [4, 8, 12, 16, 20, 24]
    assert {each.steps for each in times} == {4}
    for each in times:
        assert set(each.seconds) == set(PHASES)
        assert {len(values) for values in each.seconds.values()} == {processes}
        assert sum(each.micro_batches) == 4 * 4
        assert min(each.memory_bytes) > 10**7
        assert min(min(values) for values in each.seconds.values()) > -1e-4
    assert 0 < sum(sum(values[0] for values in each.seconds.values()) for each in times) < wall
    lines = [json.loads(line) for line in (tmp_path / "r" / "history.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] == "ranks"]
    assert [line["step"] for line in kept] == [each.step for each in times]
    assert kept[-1]["phases"]["forward"] == pytest.approx(times[-1].seconds["forward"], abs=1e-5)


def test_a_slow_rank_is_named_once(ranks, tmp_path):
    events = ranks(3, train_there, recipe_of(tmp_path, seconds=0.03), {})[0]
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert len([text for text in warnings if text.startswith("rank 1 is the slowest for 3 times: ")]) == 1
    assert not [text for text in warnings if "slowest" in text and not text.startswith("rank 1 ")]


def times(forward, *, data=0.001, waits=0.0, delayed=0.0, micro_batches=None, step=10):
    """Figures of ten steps, in seconds per step: a number for all ranks, or a list."""
    size = len(forward)
    lists = {"data": data, "forward": forward, "exchange": waits}
    seconds = {name: (0.0,) * size for name in PHASES}
    for name, value in lists.items():
        values = value if isinstance(value, list) else [value] * size
        seconds[name] = tuple(10 * each for each in values)
    return RankTimes(
        step=step,
        steps=10,
        seconds=seconds,
        delayed_seconds=tuple(delayed if isinstance(delayed, list) else [delayed] * size),
        micro_batches=tuple(micro_batches or [40] * size),
        memory_bytes=(1,) * size,
    )


def said(*events, window_seconds=0.5):
    found = []
    stragglers = Stragglers(lambda event: found.append(event.message), window_seconds)
    for event in events:
        stragglers.notice(event)
    return found


def test_the_reason_of_a_slow_rank_is_named():
    slow = times([0.05, 0.05, 0.1], waits=[0.05, 0.05, 0.0])
    (text,) = said(slow, slow, slow, slow, slow)
    assert text == (
        "rank 2 is the slowest for 3 times: 25.2 ms for a micro-batch, the others 12.8 ms, and they wait 50.0 ms in "
        "each step. Its processor is slower: another model, a lower clock rate (heat, power saving), or slower memory"
    )
    (text,) = said(*[times([0.05, 0.05, 0.05], data=[0.001, 0.08, 0.001])] * 3)
    assert text.startswith("rank 1 is")
    assert text.endswith("It waits for its data: raise data.workers, or look at its disk")
    (text,) = said(*[times([0.1, 0.05], delayed=[0.4, 0.01])] * 3)
    assert text.endswith("Its core is shared: for 40% of the time other processes ran on it")


@pytest.mark.parametrize(
    "events",
    [
        [times([0.05, 0.052, 0.06])] * 9,
        [times([0.05, 0.05, 0.1])] * 2,
        [times([0.05, 0.1]), times([0.1, 0.05])] * 9,
        [times([0.1, 0.05], data=0.0, micro_batches=[80, 40])] * 9,
        [times([0.05])] * 9,
    ],
    ids=["hardly slower", "too short", "in turns", "more micro-batches", "alone"],
)
def test_no_rank_is_named_without_need(events):
    assert said(*events) == []


def test_short_windows_are_taken_together():
    assert said(*[times([0.01, 0.02])] * 8, window_seconds=1.0) == []
    assert len(said(*[times([0.01, 0.02])] * 20, window_seconds=1.0)) == 1
