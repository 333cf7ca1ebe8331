"""The processes that a machine is to run with launch.recovery=live."""

import time

import pytest
import torch

from lockstep.base.world import World
from lockstep.core.distributed.process_group import device_of
from lockstep.launch.elastic.live_slots import FREE_STARTS, MOST_STARTS, Slot, in_whole_replicas, resize
from lockstep.protocol.live_messages import NAME, worker_name


def waits(slot):
    """Seconds until it is started, rounded; None if it is not."""
    return None if slot.due is None else round(slot.due - time.monotonic(), 1)


def started(times):
    slot = Slot()
    for _ in range(times):
        slot.begin()
    slot.schedule()
    return slot


def test_the_first_starts_are_free_and_later_ones_wait_longer_and_longer():
    assert waits(started(FREE_STARTS - 1)) == 0.0 and started(1).is_due()
    assert [waits(started(FREE_STARTS + more)) for more in (0, 1, 2, 20)] == [0.5, 1.0, 2.0, 30.0]
    assert waits(started(MOST_STARTS)) is None and waits(started(MOST_STARTS - 1)) == 30.0


def test_starts_of_more_than_an_hour_ago_do_not_count():
    slot = started(MOST_STARTS)
    slot.starts = type(slot.starts)(each - 3601 for each in slot.starts)
    slot.schedule()
    assert waits(slot) == 0.0 and slot.begin() == MOST_STARTS + 1


def test_one_that_has_failed_by_itself_waits_and_a_closed_one_for_ever():
    slot, closed = Slot(), Slot(is_closed=True)
    slot.schedule(has_failed=True)
    closed.schedule()
    assert (waits(slot), waits(closed)) == (30.0, None)


def test_resizing_leaves_rank_0_and_the_spares():
    slots = [Slot(), Slot(), Slot(), Slot(is_spare=True)]
    resize(slots, 1, ranked=[2, 0])
    assert [slot.is_closed for slot in slots] == [True, True, False, False]
    resize(slots, 4, ranked=[2, 0])
    assert [slot.is_closed for slot in slots] == [False] * 5 and [slot.due is not None for slot in slots] == [
        *(True, True, False, False, True)
    ]
    resize(slots, 4, ranked=[])
    assert len(slots) == 5


def test_numbers_of_processes_make_whole_replicas():
    assert [in_whole_replicas(wanted, 2, 1) for wanted in (1, 2, 3)] == [2, 2, 4]
    assert [in_whole_replicas(wanted, 4, 2) for wanted in (1, 2, 3)] == [2, 2, 4]
    assert in_whole_replicas(3, 1, 1) == 3 and in_whole_replicas(3, 2, 4) == 3


@pytest.mark.parametrize(("name", "gpu"), [(worker_name(0, 1, 7), 1), (worker_name(2, 3, 1), 1), (None, 0)])
def test_one_that_joins_has_the_gpu_of_its_slot(monkeypatch, name, gpu):
    """Until it joins it is alone, with local rank 0, as a process without live recovery may be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if name:
        monkeypatch.setenv(NAME, name)
    assert device_of(World()) == torch.device("cuda", gpu)
