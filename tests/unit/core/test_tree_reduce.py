"""Sums in a fixed tree: the same bits for any number of processes, any shards present, any floats."""

import math
import struct
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.distributed.process_group import world_group
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum, cover, root, tree_sum

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


def bits(tensor):
    """The bytes of float32 numbers, every NaN's as well."""
    return tensor.contiguous().view(torch.int32).tolist()


PATTERNS = st.one_of(
    st.integers(0, 2**32 - 1),  # any bits at all: one in 256 is a NaN with a payload, as many are denormals
    st.floats(width=32).map(lambda x: struct.unpack("<I", struct.pack("<f", x))[0]),
    st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x80000000, 1, 0x007FFFFF, 0x7F7FFFFF]),
)
"""Bits of a float32; the last are infinities, the NaNs that Python and the processor make, and the edges."""


def rows_of(patterns):
    """V x 3 float32 from 3 V patterns."""
    return torch.tensor([p - (p >> 31 << 32) for p in patterns], dtype=torch.int32).view(torch.float32).view(-1, 3)


CASES = SHARDS.flatmap(
    lambda case: st.tuples(st.just(case), st.lists(PATTERNS, min_size=3 * case[0], max_size=3 * case[0]))
)


@settings(deadline=None, max_examples=300)
@given(CASES, st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_sum_is_the_same_bits_for_any_split_and_any_order_of_arrival(case, world, random):
    """Any floats: huge beside tiny, denormals, infinities of either sign, NaNs with their payloads."""
    (shards, present), patterns = case
    present, rows = frozenset(present), rows_of(patterns)
    parts = []
    for owned in split(shards, world):
        own = TreeSum(present, cover(owned, present))
        mine = sorted(owned & present)
        random.shuffle(mine)
        for shard in mine:
            own.add((shard, 1), rows[shard].clone())
        assert set(own.partials) == set(cover(owned, present))
        parts += own.partials.items()
    random.shuffle(parts)
    top = TreeSum(present, [root(present)])
    for node, value in parts:
        top.add(node, value)
    assert bits(top.partials[root(present)]) == bits(tree_sum(rows, present))


FINITE = st.floats(-(2.0**120), 2.0**120, width=32)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(FINITE, st.floats(-(2.0**-120), 2.0**-120, width=32)), min_size=1, max_size=70), st.data())
def test_the_sum_is_right_to_within_the_trees_error_bound(numbers, data):
    """Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.2: |error| <= gamma(depth) * sum |x|, with
    gamma(k) = k u / (1 - k u) and u = 2**-24. It holds for denormals too: a sum that is one has no error at all."""
    rows = torch.tensor(numbers, dtype=torch.float32)
    present = frozenset(data.draw(st.sets(st.integers(0, len(numbers) - 1), min_size=1)))
    summed = [rows[shard].item() for shard in present]
    depth = math.ceil(math.log2(len(numbers))) if len(numbers) > 1 else 0
    gamma = depth * 2**-24 / (1 - depth * 2**-24)
    found = tree_sum(rows, present).item()
    error = abs(Fraction(found) - sum(map(Fraction, summed)))  # fsum rounds as well, if only to 53 bits: no rounding
    assert error <= Fraction(gamma) * sum(abs(Fraction(number)) for number in summed)
    assert found == pytest.approx(math.fsum(summed), rel=0, abs=gamma * math.fsum(map(abs, summed)) * 1.000001)


@settings(deadline=None)
@given(st.lists(st.sampled_from([1.0, -2.5, 1e-42, math.inf, -math.inf, math.nan]), min_size=1, max_size=40))
def test_infinities_and_nan_come_out_as_they_must(numbers):
    found = tree_sum(torch.tensor(numbers), frozenset(range(len(numbers)))).item()
    special = {number for number in numbers if not math.isfinite(number)}
    if any(math.isnan(number) for number in special) or len(special) == 2:
        assert math.isnan(found)
    elif special:
        assert found == special.pop()
    else:
        assert math.isfinite(found)


@pytest.mark.parametrize("shards", [1, 8, 13, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_rank_keeps_few_partial_sums(shards, world):
    present = frozenset(range(shards))
    for owned in split(shards, world):
        own = TreeSum(present, cover(owned, present))
        for shard in sorted(owned):
            own.add((shard, 1), torch.zeros(1))
            if shards % world == 0:
                assert len(own.partials) <= math.log2(shards / world) + 1


def exchange_on_rank(shards, present, numbers):
    """Each rank sums its own rows, of which some hold infinities, NaNs and denormals, then all finish the tree."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(shards, numbers, generator=generator)
    special = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 1e-42, 3e38, -3e38, 1e-30])
    strange = special[torch.randint(0, 8, rows.shape, generator=generator)]
    rows = torch.where(torch.rand(rows.shape, generator=generator) < 0.2, strange, rows)
    owners = split(shards, dist.get_world_size())
    all_reduce = AllReduce(owners, present, world_group())
    own = TreeSum(present, all_reduce.nodes[all_reduce.rank])
    for shard in sorted(owners[all_reduce.rank] & present):
        own.add((shard, 1), rows[shard].clone())
    parts = [own.partials[node] for node in all_reduce.nodes[all_reduce.rank]]
    return all_reduce.sum(parts or [torch.full((numbers,), float("nan"))]), tree_sum(rows, present)


@pytest.mark.parametrize("present", [frozenset(range(8)), frozenset({0, 3, 4}), frozenset({6})], ids=str)
@pytest.mark.parametrize("numbers", [1, 10, 1001])
@pytest.mark.parametrize("world", [2, 3])
def test_exchange_over_real_processes(ranks, world, numbers, present):
    for found, expected in ranks(world, exchange_on_rank, 8, present, numbers):
        assert bits(found) == bits(expected)
