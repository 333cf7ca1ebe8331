"""Ranks of one machine add with each other first, in shared memory where they can: the tree's bits in every layout, and
nothing left behind."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.core.distributed.process_group import world_group
from lockstep.core.reduction import transport as shared_memory
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.topology import this_machine, topology
from lockstep.core.reduction.transport import MachineFirstTransport, SharedMemoryTransport
from lockstep.core.reduction.tree import TreeSum, tree_sum
from lockstep.parallel.strategies._ddp import CommThread


def rows_of(shards, numbers, dtype):
    return (torch.randn(shards, numbers, generator=torch.Generator().manual_seed(7)) * 1e3).to(dtype)


def sum_on_rank(machine_of, case, numbers, dtype):
    """Fill this rank's slots for a few steps and finish the tree: (the sums, whether memory was shared)."""
    shards, presents = case
    rank, world = dist.get_rank(), dist.get_world_size()
    table = topology(f"machine {machine_of[rank]}")
    if table is None:
        return None
    transport = SharedMemoryTransport(world_group(), table)
    owned = [frozenset(range(r * shards // world, (r + 1) * shards // world)) for r in range(world)]
    rows, buffer, found = rows_of(shards, numbers, dtype), torch.empty(numbers, dtype=dtype), []
    for present in presents:
        all_reduce = AllReduce(owned, present, world_group())
        slots = transport.slots(0, buffer, all_reduce.max_nodes)
        own = TreeSum(present, all_reduce.nodes[rank])
        for shard in sorted(owned[rank] & present):
            own.add((shard, 1), rows[shard].clone())
        for slot in slots:
            slot.fill_(float("nan"))
        for node, slot in zip(all_reduce.nodes[rank], slots, strict=False):
            slot.copy_(own.partials[node])
        whole = transport.sum(0, slots, all_reduce)
        assert whole.data_ptr() == buffer.data_ptr()
        found.append(whole.clone())
    return found, bool(transport.rows[0])


@pytest.mark.parametrize(
    "machine_of",
    [
        pytest.param([0, 0], id="2"),
        pytest.param([0, 0, 0], id="3"),
        pytest.param([0, 0, 1, 1], id="2+2"),
        pytest.param([1, 0, 1, 0], id="interleaved"),
        pytest.param([0] * 5, id="5"),
    ],
)
@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [(1, torch.float32), (1001, torch.float64), (300_007, torch.float32), (1001, torch.bfloat16)],
    ids=str,
)
def test_the_sum_is_the_trees(ranks, machine_of, numbers, dtype):
    case = 13, [frozenset(range(13)), frozenset({0, 3, 4}), frozenset({12}), frozenset(range(13))]
    expected = [tree_sum(rows_of(13, numbers, dtype), present) for present in case[1]]
    for found, is_shared in ranks(len(machine_of), sum_on_rank, machine_of, case, numbers, dtype):
        assert is_shared
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_more_ranks_than_shards(ranks):
    case = 3, [frozenset(range(3)), frozenset({1})]
    expected = [tree_sum(rows_of(3, 10, torch.float32), present) for present in case[1]]
    for found, _ in ranks(5, sum_on_rank, [0] * 5, case, 10, torch.float32):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def machine_first_on_rank(machine_of, case, numbers, dtype):
    """Finish the tree for a few steps as GPUs of several machines do -> (the sums, bytes sent to another machine)."""
    shards, presents = case
    rank, world = dist.get_rank(), dist.get_world_size()
    table = topology(f"machine {machine_of[rank]}", has_single=False)
    if table is None:
        return None
    transport, sent, send = MachineFirstTransport(world_group(), table), 0, dist.isend

    def counted(tensor, *args, **kwargs):
        nonlocal sent
        sent += tensor.nbytes
        return send(tensor, *args, **kwargs)

    dist.isend = counted  # what is exchanged within a machine is no message but a collective
    try:
        owned = [frozenset(range(r * shards // world, (r + 1) * shards // world)) for r in range(world)]
        rows, found = rows_of(shards, numbers, dtype), []
        for present in presents:
            all_reduce = AllReduce(owned, present, world_group())
            own = TreeSum(present, all_reduce.nodes[rank])
            for shard in sorted(owned[rank] & present):
                own.add((shard, 1), rows[shard].clone())
            slots = [own.partials[node] for node in all_reduce.nodes[rank]]
            found.append(transport.sum(0, slots or [torch.empty(numbers, dtype=dtype)], all_reduce).clone())
    finally:
        dist.isend = send
    return found, sent


@pytest.mark.parametrize("machine_of", [[0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]], ids=str)
@pytest.mark.parametrize(("numbers", "dtype"), [(1, torch.float32), (1001, torch.bfloat16)], ids=str)
def test_what_machines_add_first_has_the_trees_bits(ranks, machine_of, numbers, dtype):
    case = 13, [frozenset(range(13)), frozenset({0, 3, 4}), frozenset({12})]
    expected = [tree_sum(rows_of(13, numbers, dtype), present) for present in case[1]]
    for found, _ in ranks(len(machine_of), machine_first_on_rank, machine_of, case, numbers, dtype):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_rank_sends_its_share_of_a_bucket_to_other_machines(ranks):
    case = 8, [frozenset(range(8))]
    for _, sent in ranks(4, machine_first_on_rank, [0, 0, 1, 1], case, 1000, torch.float32):
        assert sent == 2 * 4 * 1000 // 4  # half of half a bucket to the other machine, and its sum back


def test_a_single_machine_has_none_to_add_before(ranks):
    assert ranks(2, machine_first_on_rank, [0, 0], (4, []), 1, torch.float32) == [None] * 2


def failing(*_):
    raise RuntimeError("no descriptor is left")


def sum_where_rank_1_fails(name, value, *args):
    """With another value of a name of the module's on one rank."""
    usual = getattr(shared_memory, name)
    if dist.get_rank() == 1:
        setattr(shared_memory, name, value)
    try:
        return sum_on_rank(*args)
    finally:
        setattr(shared_memory, name, usual)


@pytest.mark.parametrize(
    ("name", "value"),
    [("FREE_FACTOR", 1e15), ("_offer", failing), ("_opened", failing)],
    ids=["no room", "cannot share", "cannot open"],
)
def test_where_one_rank_cannot_share_the_sum_goes_over_the_wire(ranks, name, value):
    case = 8, [frozenset(range(8)), frozenset({0, 3, 4})]
    expected = [tree_sum(rows_of(8, 1001, torch.float32), present) for present in case[1]]
    for found, is_shared in ranks(3, sum_where_rank_1_fails, name, value, [0] * 3, case, 1001, torch.float32):
        assert not is_shared
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("machine_of", [[0, 1], [0, 0, 1]], ids=["all alone", "uneven"])
def test_machines_that_do_not_fit_a_table_take_the_wire(ranks, machine_of):
    assert ranks(len(machine_of), sum_on_rank, machine_of, (4, []), 1, torch.float32) == [None] * len(machine_of)


def shared_now():
    """What of /dev/shm this process has open, and the names there that are its own."""
    opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    named = sorted(path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    return sorted(name for name in opened if "torch" in name), named


def shared_at_rest():
    """What is shared before, during and after a sum."""
    gc.collect()
    before = shared_now()
    transport = SharedMemoryTransport(world_group(), topology("here"))
    transport.slots(0, torch.empty(1000), 2)
    during = shared_now()
    del transport
    gc.collect()
    return before, during, shared_now()


def test_nothing_is_left_in_shared_memory(ranks):
    for before, during, after in ranks(2, shared_at_rest):
        assert len(during[0]) == len(before[0]) + 4  # two slots of two ranks
        assert before == after
        assert after[1] == during[1] == []


def test_processes_of_this_machine_recognise_each_other(ranks):
    assert len(set(ranks(2, this_machine))) == 1


def test_the_thread_hands_on_errors_and_ends_with_its_owner(lone):
    thread = CommThread()
    assert thread.run(lambda: torch.ones(2)).wait().tolist() == [1, 1]
    future = thread.run(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        future.wait()
    with pytest.raises(ZeroDivisionError):
        thread.check()
    tasks = thread._tasks
    del thread
    gc.collect()
    deadline = time.monotonic() + 5
    while not tasks.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tasks.empty()
