"""Who keeps the others waiting, in one sentence; whether weights are still the same; when a run has to stop in time."""

import multiprocessing
import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.base.errors import Desync
from lockstep.core.host import activity, loader_stacks
from lockstep.core.numerics.checksum import checksum
from lockstep.observe.diagnose.desync import RankComparison
from lockstep.observe.diagnose.hang_verdict import Report, ranks_text, verdict
from lockstep.observe.diagnose.stacks import CodeLine, parsed, stack_of, telling
from lockstep.training import loop_state
from lockstep.training.loop_state import Deadline


def report(rank, waits_in=None, location="my_data.py:41 `__getitem__`", seconds=12.4, step=1841):
    facts = {"process": 100 + rank, "host": "here", "stacks": ""}
    return Report(rank=rank, step=step, waits_in=waits_in, location=location, seconds=seconds, **facts)


EXCHANGE = "the gradient exchange"


@pytest.mark.parametrize(
    ("reports", "silent", "said"),
    [
        (
            [report(0, EXCHANGE), report(1, EXCHANGE), report(2, EXCHANGE), report(3)],
            (),
            "rank 3 is in my_data.py:41 `__getitem__` for 12 s; ranks 0-2 wait in the gradient exchange of step 1841",
        ),
        (
            [report(0, EXCHANGE), report(2, EXCHANGE)],
            ["rank 1 (process 101) has sent no heartbeat for 30 s: it is stopped"],
            "rank 1 (process 101) has sent no heartbeat for 30 s: it is stopped; ranks 0, 2 wait in the gradient "
            "exchange of step 1841",
        ),
        (
            [report(0, EXCHANGE), report(1, "a decision of rank 0", step=1842)],
            (),
            "rank 0 waits in the gradient exchange of step 1841; rank 1 waits in a decision of rank 0 of step 1842: they "
            "wait for each other in different places, so none can go on",
        ),
        (
            [report(0, EXCHANGE), report(1, EXCHANGE)],
            (),
            "ranks 0-1 wait in the gradient exchange of step 1841: all are there, so the network or the device between "
            "them is stuck",
        ),
        ([report(0), report(1, seconds=3.0)], (), "ranks 0-1 are in my_data.py:41 `__getitem__` for 3 s"),
    ],
)
def test_one_sentence_names_who_is_waited_for(reports, silent, said):
    assert verdict(reports, silent) == said


@given(st.sets(st.integers(0, 99), min_size=1))
def test_ranks_are_told_shortly_and_none_is_lost(ranks):
    kind, text = ranks_text(ranks).split(" ", 1)
    assert kind == ("rank" if len(ranks) == 1 else "ranks")
    parts = [[int(number) for number in part.split("-")] for part in text.split(", ")]
    assert {number for part in parts for number in range(part[0], part[-1] + 1)} == ranks
    assert all(a[-1] + 1 < b[0] for a, b in zip(parts, parts[1:], strict=False))


def test_the_users_own_line_is_the_telling_one():
    library, ours = threading.__file__, loader_stacks.__file__
    stack = [CodeLine(library, 5, "wait"), CodeLine("/home/x/my_data.py", 41, "read"), CodeLine(ours, 9, "step")]
    assert str(telling(stack)) == "/home/x/my_data.py:41 `read`"
    assert telling([CodeLine(f"{os.getcwd()}/data/mine.py", 1, "f")]).file == "data/mine.py"
    assert telling([stack[0], stack[2]]) == stack[0], "without one, the innermost"
    assert any(
        place.function == "test_the_users_own_line_is_the_telling_one" for place in stack_of(threading.get_ident())
    )
    assert stack_of(-1) == []


def test_a_thread_waits_in_the_innermost_place():
    me = threading.get_ident()
    assert activity.waits(me) is None
    with activity.waiting_in("a"), activity.waiting_in("b"):
        assert activity.waits(me) == "b"
    assert activity.waits(me) is None
    activity.progress()
    assert activity.seconds_without_progress() < 1


def dawdle(files, ready):
    files.register(0)
    ready.set()
    time.sleep(60)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_worker_process_says_where_it_is_whatever_it_is_at():
    context = multiprocessing.get_context("fork")
    files, ready = loader_stacks.StackFiles(1), context.Event()
    worker = context.Process(target=dawdle, args=(files, ready))
    worker.start()
    try:
        assert ready.wait(30)
        for _ in range(2):  # each answer is the newest
            dump = loader_stacks.dump_all()[worker.pid]
            assert "dawdle" in [line.function for line in parsed(dump)]
    finally:
        worker.kill()
        worker.join()


# ---- weights that come apart


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64]
)
def test_one_changed_bit_changes_the_checksum(dtype):
    tensor = torch.arange(60).to(dtype).view(5, 12).t()
    before = checksum(tensor)
    flat = tensor.t().flatten()
    flat.view(torch.uint8)[7] ^= 4
    assert checksum(flat.view(5, 12).t()) != before
    assert before.dtype == torch.int64


def compared(changes):
    """Weights of this rank, changed in places before step 20 -> what a comparison says."""
    weights = {f"w{number}": torch.ones(3) for number in range(6)}
    comparison = RankComparison(weights.items(), 0, range(dist.get_world_size()))
    comparison.check(10)
    for name in changes.get(dist.get_rank(), []):
        weights[name][1] = 2.0
    try:
        comparison.check(20)
    except Desync as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("world", "changes", "said"),
    [
        (1, {0: ["w0"]}, None),
        (3, {}, None),
        (3, {1: ["w2"]}, "w2: rank 1 differs from ranks 0, 2"),
        (2, {1: ["w2"]}, "w2: ranks 0-1 differ"),
        (4, {0: ["w0"], 3: ["w0"]}, "w0: ranks 0-3 differ"),
        (3, {2: ["w0", "w1", "w3", "w4"]}, "and 1 more parameters"),
    ],
)
def test_who_differs_in_what_since_when(ranks, world, changes, said):
    found = ranks(world, compared, changes)
    assert found == found[:1] * world
    assert (found[0] is None) == (said is None)
    if said:
        assert said in found[0]
        assert "first seen after step 20 (equal after step 10)" in found[0]


# ---- time limits


def test_a_run_stops_while_there_is_time_to_save(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(loop_state.time, "time", lambda: now[0])
    limit = Deadline(1.0, began=1000.0)
    assert not limit.is_near(save_seconds=0.0)
    now[0] += 4.0  # a step with an evaluation
    assert not limit.is_near(save_seconds=0.0)
    now[0] += 1.0
    assert not limit.is_near(save_seconds=20.0)  # 5 + 3 * 4 + 2 * 20 + 2 < 60
    now[0] += 1.0
    assert limit.is_near(save_seconds=20.0)
    assert not limit.is_near(save_seconds=0.0)
    now[0] = 1046.0
    assert limit.is_near(save_seconds=0.0)
    assert not Deadline(None, began=0.0).is_near(save_seconds=1e9)
