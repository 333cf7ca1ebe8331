"""Sums in a fixed tree: the same bits for any number of processes, any shards present, any floats."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.runtime.exchange import Exchange
from lockstep.runtime.process_group import world_group
from lockstep.runtime.tree_reduce import TreeSum, cover, root, tree_sum

SHARDS = st.integers(1, 40).flatmap(lambda v: st.tuples(st.just(v), st.sets(st.integers(0, v - 1), min_size=1)))


def split(shards, world):
    return [frozenset(range(r * shards // world, (r + 1) * shards // world)) for r in range(world)]


def leaves(node, present):
    return {shard for shard in present if node[0] <= shard < node[0] + node[1]}


@given(SHARDS, st.integers(1, 12))
def test_ranks_nodes_hold_each_present_shard_once(case, world):
    shards, present = case[0], frozenset(case[1])
    nodes = [node for owned in split(shards, world) for node in cover(owned, present)]
    found = [shard for node in nodes for shard in leaves(node, present)]
    assert sorted(found) == sorted(present)


@given(SHARDS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_sum_is_the_same_bits_for_any_split_and_any_order_of_arrival(case, world, random):
    shards, present = case[0], frozenset(case[1])
    rows = torch.randn(shards, 3, generator=torch.Generator().manual_seed(random.randrange(1 << 30))) * 1e3
    whole = tree_sum(rows, present)
    parts = []
    for owned in split(shards, world):
        own = TreeSum(present, cover(owned, present))
        mine = sorted(owned & present)
        random.shuffle(mine)
        for shard in mine:
            own.add((shard, 1), rows[shard].clone())
        assert set(own.parts) == set(cover(owned, present))
        parts += own.parts.items()
    random.shuffle(parts)
    top = TreeSum(present, [root(present)])
    for node, value in parts:
        top.add(node, value)
    assert torch.equal(top.parts[root(present)], whole)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=70))
def test_the_sum_is_right_to_within_the_trees_error_bound(numbers):
    rows = torch.tensor(numbers, dtype=torch.float32)
    depth = math.ceil(math.log2(len(numbers))) if len(numbers) > 1 else 0
    bound = depth * 2**-24 * 1.01 * math.fsum(abs(n) for n in rows.tolist()) + 1e-38
    found = tree_sum(rows, frozenset(range(len(numbers)))).item()
    assert abs(found - math.fsum(rows.tolist())) <= bound


@pytest.mark.parametrize("shards", [1, 8, 13, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_rank_keeps_few_partial_sums(shards, world):
    present = frozenset(range(shards))
    for owned in split(shards, world):
        own = TreeSum(present, cover(owned, present))
        for shard in sorted(owned):
            own.add((shard, 1), torch.zeros(1))
        if shards % world == 0 and owned:
            assert own.peak <= math.log2(shards / world) + 1


def exchange_on_rank(shards, present, numbers):
    """Each rank sums its own rows, then all finish the tree."""
    rows = torch.randn(shards, numbers, generator=torch.Generator().manual_seed(7))
    owners = split(shards, dist.get_world_size())
    exchange = Exchange(owners, present, world_group())
    own = TreeSum(present, exchange.nodes[exchange.rank])
    for shard in sorted(owners[exchange.rank] & present):
        own.add((shard, 1), rows[shard].clone())
    parts = [own.parts[node] for node in exchange.nodes[exchange.rank]]
    return exchange.sum(parts or [torch.full((numbers,), float("nan"))]), tree_sum(rows, present)


@pytest.mark.parametrize("present", [frozenset(range(8)), frozenset({0, 3, 4}), frozenset({6})], ids=str)
@pytest.mark.parametrize("numbers", [1, 10, 1001])
@pytest.mark.parametrize("world", [2, 3])
def test_exchange_over_real_processes(ranks, world, numbers, present):
    for found, expected in ranks(world, exchange_on_rank, 8, present, numbers):
        assert torch.equal(found, expected)
