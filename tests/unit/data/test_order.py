"""The order of samples: a pure function, each sample once per epoch, entered anywhere at once, never changed silently."""

import contextlib
import gc
import math
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.order import GOLDEN, MAX_CACHED, Order, bit_reversed, mix, permutation, permuted
from lockstep.data.sampler import TrainingRequests


def holds_for(*strategies):
    """Hypothesis' own `given`, on machines of any speed."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


@st.composite
def orders(draw, has_lengths=(True, False), full=False):
    micro_batch = draw(st.integers(1, 9))
    if full:  # every micro-batch of every step has all its samples
        global_batch = micro_batch * draw(st.integers(1, 9))
        samples = global_batch * draw(st.integers(1, 6))
    else:
        global_batch = draw(st.integers(micro_batch, 60))
        samples = draw(st.integers(1, 300))
    drawn = st.lists(st.integers(0, 500), min_size=samples, max_size=samples).map(np.array)
    return Order(
        seed=draw(st.integers(0, 2**64 - 1)),
        samples=samples,
        global_batch=global_batch,
        micro_batch=micro_batch,
        lengths=draw(drawn) if draw(st.sampled_from(has_lengths)) else None,
        window=draw(st.integers(1, 9)),
    )


def epoch_of(order, epoch):
    first = epoch * order.steps_per_epoch
    return [order.shards(step) for step in range(first, first + order.steps_per_epoch)]


def flat(shards):
    return [sample for shard in shards for sample in shard.tolist()]


def listed(shards):
    return [shard.tolist() for shard in shards]


@holds_for(orders(), st.integers(0, 10**6))
def test_every_sample_comes_once_per_epoch(order, epoch):
    steps = epoch_of(order, epoch)
    assert sorted(sample for shards in steps for sample in flat(shards)) == list(range(order.samples))
    sizes = [len(flat(shards)) for shards in steps]
    assert sizes[:-1] == [order.global_batch] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= order.global_batch


@holds_for(orders(), st.integers(0, 10**9))
def test_a_shard_never_holds_more_than_a_micro_batch(order, step):
    shards = order.shards(step)
    assert len(shards) == order.shards_per_step == -(-order.global_batch // order.micro_batch)
    assert max(map(len, shards)) <= order.micro_batch
    ragged = [len(shard) for shard in shards if 0 < len(shard) < order.micro_batch]
    assert len(ragged) <= 1


@holds_for(orders(), st.lists(st.integers(0, 40), max_size=8))
def test_a_step_depends_on_its_arguments_alone(order, visited_before):
    """A fresh object, an emptied cache and any history of other steps give the same step."""
    expected = listed(order.shards(17))
    for step in visited_before:
        order.shards(step)
    permutation.cache_clear()
    assert listed(replace(order).shards(17)) == expected == listed(order.shards(17))


@holds_for(orders(), st.integers(0, 30))
def test_lengths_only_rearrange_within_a_window(order, step):
    plain = replace(order, lengths=None)
    place = step % order.steps_per_epoch
    first = step - place % order.window
    steps = range(first, min(first + order.window, step - place + order.steps_per_epoch))
    some, others = (sorted(s for at in steps for s in flat(o.shards(at))) for o in (order, plain))
    assert some == others
    assert len(flat(order.shards(step))) == len(flat(plain.shards(step)))


@holds_for(orders(has_lengths=(True,)), st.integers(0, 5))
def test_steps_of_a_window_do_not_overlap_in_length(order, epoch):
    """But for a smaller last step, whose samples come from a random place between two others."""
    lengths = [order.lengths[flat(shards)] for shards in epoch_of(order, epoch)]
    for first in range(0, len(lengths), order.window):
        ranges = sorted((some.min(), some.max()) for some in lengths[first : first + order.window])
        assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:], strict=False))


def test_steps_of_a_window_come_in_any_order():
    """Long texts are as likely to come first as last, in every epoch anew, and so is the smaller last step."""
    lengths = np.arange(1000)
    order = Order(seed=3, samples=995, global_batch=10, micro_batch=5, lengths=lengths, window=10)
    places, rest = np.zeros((10, 10)), []
    for epoch in range(100):
        means = np.array([lengths[flat(shards)].mean() for shards in epoch_of(order, epoch)])
        for first in range(0, 90, 10):
            places[np.arange(10), np.argsort(np.argsort(means[first : first + 10]))] += 1
        rest.append(int((means[90:99] < means[99]).sum()))
    expected = places.sum() / 100
    assert ((places - expected) ** 2 / expected).sum() < 81 + 5 * np.sqrt(2 * 81)
    assert min(np.bincount(rest, minlength=10)) > 5


@holds_for(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_another_seed_or_epoch_gives_another_permutation(seed, other_seed, epoch, other_epoch):
    same = np.array_equal(permutation(seed, epoch, 64), permutation(other_seed, other_epoch, 64))
    assert same == ((seed, epoch) == (other_seed, other_epoch))


def test_permutations_have_no_favourites():
    """Each of 40 samples is about equally often in each of 40 places, over 4,000 epochs: chi-square by place."""
    places = np.array([permutation(3, epoch, 40) for epoch in range(4000)])
    counts = np.stack([np.bincount(column, minlength=40) for column in places.T])
    chi_square = ((counts - 100.0) ** 2 / 100.0).sum(axis=1)
    assert chi_square.mean() == pytest.approx(39, rel=0.15)
    assert chi_square.max() < 39 + 6 * np.sqrt(2 * 39)


@holds_for(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(1, 3000))
def test_a_permutation_holds_each_sample_once(seed, epoch, samples):
    assert sorted(permuted(np.arange(samples), seed=seed, epoch=epoch, samples=samples).tolist()) == list(
        range(samples)
    )


@holds_for(st.integers(0, 2**64 - 1), st.integers(2, 10**12), st.data())
def test_a_place_is_computed_alone(seed, samples, data):
    """Whichever places are asked for, in whatever order: each has its sample, different places different ones."""
    places = data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=20, unique=True))
    found = permuted(np.array(places), seed=seed, epoch=4, samples=samples).tolist()
    assert len(set(found)) == len(found)
    assert all(0 <= sample < samples for sample in found)
    assert found[::-1] == [int(permuted(np.array([p]), seed=seed, epoch=4, samples=samples)[0]) for p in places[::-1]]


@pytest.mark.parametrize(
    ("samples", "epochs"), [(2, 2000), (3, 3000), (4, 6000), pytest.param(5, 12000, marks=pytest.mark.matrix)]
)
def test_every_permutation_of_few_samples_is_equally_likely(samples, epochs):
    """Odd ones included, which networks of this kind often leave out."""
    counts = {}
    for epoch in range(epochs):
        order = tuple(permuted(np.arange(samples), seed=3, epoch=epoch, samples=samples).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == math.factorial(samples)
    expected = epochs / len(counts)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < len(counts) - 1 + 5 * np.sqrt(2 * (len(counts) - 1))


@pytest.mark.parametrize("samples", [97, 1030, 1500])
def test_neighbours_are_parted(samples):
    """How far two samples come apart is equally likely for all distances, also for those that are stored together."""
    epochs, bins = 2000, 40
    places = np.array(
        [np.argsort(permuted(np.arange(samples), seed=9, epoch=e, samples=samples)) for e in range(epochs)]
    )
    expected = np.bincount(np.arange(1, samples) * bins // samples, minlength=bins) * epochs / (samples - 1)
    for one, other in ((0, 1), (1, 2), (0, samples // 2), (samples - 2, samples - 1)):
        apart = (places[:, one] - places[:, other]) % samples
        counts = np.bincount(apart * bins // samples, minlength=bins)
        assert ((counts - expected) ** 2 / expected).sum() < bins - 1 + 5 * np.sqrt(2 * (bins - 1))


def test_an_order_is_the_same_kept_or_computed(monkeypatch):
    order = Order(seed=5, samples=1003, global_batch=64, micro_batch=8)
    kept = [listed(order.shards(step)) for step in range(40)]
    monkeypatch.setattr("lockstep.data.order.MAX_CACHED", 0)
    assert [listed(order.shards(step)) for step in range(40)] == kept


def test_a_step_of_very_many_samples_takes_little_memory():
    order = Order(seed=5, samples=10**12, global_batch=1024, micro_batch=8)
    assert order.samples > MAX_CACHED
    assert work(lambda: order.shards(10**6))[1] < 500_000


def work(function):
    """What a call costs, without a clock: (calls of Python's and of C's functions, most bytes held at once)."""
    permutation.cache_clear()
    bit_reversed.cache_clear()
    calls, profiler = 0, sys.getprofile()

    def count(_, event, __):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what other tests have left is not this call's to clear away
    tracemalloc.start()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(profiler)
        gc.enable()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak


@pytest.mark.parametrize("has_lengths", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_a_far_step_costs_what_the_first_one_does(has_lengths):
    """To the last function call and, but for a few bytes of larger numbers, in memory: nothing is skipped through.

    Memory is counted for all threads, and one that an earlier test left may take some meanwhile: least of three.
    """
    samples = 142 * 141  # cells that a grid has: none is permuted twice
    lengths = np.random.default_rng(0).integers(1, 128, samples) if has_lengths else None
    order = Order(seed=5, samples=samples, global_batch=64, micro_batch=8, lengths=lengths)
    steps = (1, 313, 1_000_001, 1_000_000_000)  # whole ones: the last of an epoch, 312, costs less
    for entered in (
        order.shards,
        lambda step: next(iter(TrainingRequests(order=order, owned=lambda *_: [1, 2], start=step, stop=2 * 10**9))),
    ):
        entered(0)  # what is imported or made once is not the step's
        costs = [min(work(lambda step=step, entered=entered: entered(step)) for _ in range(3)) for step in steps]
        assert len({calls for calls, _ in costs}) == 1, costs
        assert max(peak for _, peak in costs) - min(peak for _, peak in costs) < 4096, costs
    assert order.epoch(1_000_000_000) == 1_000_000_000 // 313
    assert len(flat(order.shards(1_000_000_000))) == 64


@holds_for(orders(), st.integers(0, 10**9))
def test_what_is_done_to_a_step_does_not_come_back(order, step):
    """The order keeps its permutation: nobody can write into it, or into another's step."""
    expected = listed(order.shards(step))
    before = None if order.lengths is None else order.lengths.tolist()
    for shard in order.shards(step):
        with contextlib.suppress(ValueError):  # read-only, where it is a view of the kept permutation
            shard[:] = 0
    assert listed(order.shards(step)) == expected
    assert before is None or order.lengths.tolist() == before


def cells(shards, lengths):
    """Tokens that the step's micro-batches hold with their padding."""
    return sum(len(shard) * int(lengths[shard].max()) for shard in shards if len(shard))


@holds_for(orders(has_lengths=(True,), full=True), st.integers(0, 3))
def test_sorting_by_length_never_pads_more(order, epoch):
    """Full micro-batches only: where the last one is short, which samples share it can be luckier unsorted."""
    plain = replace(order, lengths=None)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    own, unsorted = (sum(cells(each.shards(step), order.lengths) for step in steps) for each in (order, plain))
    assert own <= unsorted


@holds_for(orders(has_lengths=(True,)), st.integers(0, 100))
def test_micro_batches_of_a_step_do_not_overlap_in_length(order, step):
    ranges = [(order.lengths[s].min(), order.lengths[s].max()) for s in order.shards(step) if len(s)]
    ranges.sort()
    assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:], strict=False))


def test_sorting_by_length_saves_much_on_real_spreads():
    lengths = np.random.default_rng(1).geometric(0.03, 4096)
    order = Order(seed=0, samples=4096, global_batch=256, micro_batch=16, lengths=lengths)
    both = order, replace(order, lengths=None)
    waste = [sum(cells(o.shards(step), lengths) for step in range(16)) / lengths.sum() - 1 for o in both]
    assert waste[0] < 0.25 < 1.0 < waste[1]


@pytest.mark.parametrize("shards", [*range(1, 40), 64, 100, 127, 128, 1000])
def test_spread_is_a_permutation(shards):
    assert sorted(bit_reversed(shards)) == list(range(shards))


@pytest.mark.parametrize("shards", [*range(2, 70), 100, 128, 200, 256])
def test_every_half_gets_its_share_of_any_run_of_micro_batches(shards):
    """Long, short or empty ones come as runs of positions: each half of the shards takes about half of every run."""
    is_left = np.array(bit_reversed(shards)) < shards // 2
    left = np.concatenate([[0], np.cumsum(is_left)])
    every_run = left[None, :] - left[:, None]
    sizes = np.arange(shards + 1)[None, :] - np.arange(shards + 1)[:, None]
    unfair = np.abs(2 * every_run - sizes)[sizes > 0]
    assert unfair.max() <= (1 if shards & (shards - 1) == 0 else 2 + np.log2(shards))


@pytest.mark.parametrize("shards", [8, 16, 64, 128])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_rank_gets_its_share_of_the_first_micro_batches(shards, world):
    """Where shards and ranks are powers of two, no rank is ever more than one filled micro-batch ahead."""
    owner = np.array(bit_reversed(shards)) * world // shards
    for filled in range(shards + 1):
        counts = np.bincount(owner[:filled], minlength=world)
        assert counts.max() - counts.min() <= 1


def test_mix_is_splitmix64():
    """The first outputs of the reference generator for seed 0, as many implementations print them."""
    states = np.array([0, GOLDEN, 2 * GOLDEN % 2**64], dtype=np.uint64)
    assert mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_order_never_changes_silently():
    """A change here changes every run's weights: it must be meant, and said."""
    order = Order(seed=7, samples=11, global_batch=6, micro_batch=2)
    assert [listed(order.shards(step)) for step in range(4)] == [
        [[8, 3], [10, 1], [5, 7]],
        [[0, 6], [9], [4, 2]],
        [[2, 7], [9, 0], [4, 8]],
        [[1, 10], [5], [6, 3]],
    ]
    lengths = np.array([9, 1, 8, 2, 7, 3, 6, 4, 5, 5, 1])
    order = Order(seed=7, samples=11, global_batch=6, micro_batch=2, lengths=lengths)
    assert [listed(order.shards(step)) for step in range(2)] == [[[10, 1], [7, 8], [3, 5]], [[9, 6], [0], [4, 2]]]
    many = replace(order, samples=10**8, lengths=None)
    assert listed(many.shards(10**6)) == [[69026434, 7607211], [80694851, 71552637], [38997330, 78019999]]
    assert bit_reversed(6) == (0, 4, 2, 1, 5, 3)
    assert bit_reversed(8) == (0, 4, 2, 6, 1, 5, 3, 7)
