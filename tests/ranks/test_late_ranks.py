"""A rank that is late: the others wait for its messages as long as for a collective, however quickly a group opens."""

import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lockstep.core.distributed import authenticated_group, process_group
from lockstep.core.distributed.collectives import receive_object, send_object
from lockstep.core.reduction.all_reduce import AllReduce

OPENING, LATE = 2.0, 3.5
"""Seconds that a group may take to open, and that rank 1 is late."""


def summed(group):
    all_reduce = AllReduce([frozenset([0]), frozenset([1])], frozenset([0, 1]), group)
    return all_reduce.sum([torch.full((8,), dist.get_rank() + 1.0)]).tolist()


def sent(group):
    if dist.get_rank() == 0:
        return receive_object(1, group)
    send_object("late", 0, group)
    return "late"


def late(exchange):
    """Exchange something in a group whose members have proven that they know a secret."""
    opening = patch.object(authenticated_group, "CONNECT_SECONDS", OPENING)
    with opening, patch.object(process_group, "_group_secret", [b"secret"]):
        group = process_group.further_group()
        dist.barrier(group)
        time.sleep(LATE * dist.get_rank())
        found = exchange(group)
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize(("exchange", "expected"), [(summed, [3.0] * 8), (sent, "late")])
def test_a_message_is_waited_for(ranks, exchange, expected):
    assert ranks(2, late, exchange) == [expected, expected]
