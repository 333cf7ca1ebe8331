"""Batches out of what waits: everybody once, alike together, and nobody pays for another."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.inference.serving.batcher import PASS_TOKENS, Batcher, Full, Item, groups


class Model:
    """Answers with what it was asked, and notes which came together; has no answer to 13."""

    def __init__(self):
        self.batches = []

    def scores(self, samples):
        self.batches.append([len(sample) for sample in samples])
        if any(sample[0] == 13 for sample in samples):
            raise RuntimeError("thirteen")
        return np.array([[sample[0]] for sample in samples])


def sample(length, value=0):
    return np.full(length, value, dtype=np.int32)


@given(st.lists(st.tuples(st.integers(1, 512), st.booleans()), min_size=1, max_size=80))
def test_groups(waiting):
    models = Model(), Model()
    items = [Item(predictor=models[other], sample=sample(length), answer=None) for length, other in waiting]
    found = groups(items)
    assert sorted(map(id, (item for group in found for item in group))) == sorted(map(id, items))
    for group in found:
        assert len({id(item.predictor) for item in group}) == 1
        assert [item.length for item in group] == sorted((item.length for item in group), reverse=True)
        waste = sum(group[0].length - item.length for item in group)
        assert waste <= PASS_TOKENS * len(group)
    padded = sum(group[0].length * len(group) + PASS_TOKENS for group in found)
    for model in models:
        alone = [item for item in items if item.predictor is model]
        if alone:
            padded -= max(item.length for item in alone) * len(alone) + PASS_TOKENS
    assert padded <= 0  # never dearer than one pass for each model


def test_nothing_is_grouped():
    assert groups([]) == []


def running(work, **options):
    async def main():
        batcher = Batcher(**{"max_batch": 4, "max_wait_seconds": 0.0, "capacity": 100, **options})
        try:
            return await work(batcher)
        finally:
            await asyncio.to_thread(batcher.close)

    return asyncio.run(main())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("wait", [0.0, 0.01])
def test_everybody_gets_their_own(workers, wait):
    model = Model()

    async def work(batcher):
        asked = [[sample(1 + (7 * n + k) % 50, 100 * n + k) for k in range(1 + n % 3)] for n in range(60)]
        found = await asyncio.gather(*(batcher.predict(model, samples) for samples in asked))
        for samples, rows in zip(asked, found, strict=True):
            assert [row[0] for row in rows] == [each[0] for each in samples]

    running(work, workers=workers, max_wait_seconds=wait, capacity=1000)
    assert max(map(len, model.batches)) > 1
    assert max(map(len, model.batches)) <= 4


def test_one_that_fails_takes_nobody_with_it():
    async def work(batcher):
        asked = [batcher.predict(model, [sample(5, value)]) for value in (12, 13, 14)]
        return await asyncio.gather(*asked, return_exceptions=True)

    model = Model()
    before, failed, after = running(work, max_wait_seconds=0.05)
    assert (before[0][0], str(failed), after[0][0]) == (12, "thirteen", 14)


def test_what_finds_no_room_is_refused_whole():
    async def work(batcher):
        waits = asyncio.ensure_future(batcher.predict(model, [sample(3)] * 3))
        await asyncio.sleep(0)
        with pytest.raises(Full):
            await batcher.predict(model, [sample(3)] * 3)
        assert batcher.depth == 3
        assert len(await waits) == 3

    model = Model()
    running(work, capacity=5, max_wait_seconds=0.2, max_batch=50)


def test_what_nobody_waits_for_is_not_predicted():
    async def work(batcher):
        gone = asyncio.ensure_future(batcher.predict(model, [sample(7)]))
        await asyncio.sleep(0)
        gone.cancel()
        stays = await batcher.predict(model, [sample(9, 5)])
        assert stays[0][0] == 5

    model = Model()
    running(work, max_wait_seconds=0.2)
    assert model.batches == [[9]]


def test_closing_answers_what_waits_and_takes_nothing_more():
    async def work(batcher):
        waits = [asyncio.ensure_future(batcher.predict(model, [sample(4, n)])) for n in range(10)]
        await asyncio.sleep(0)
        await asyncio.to_thread(batcher.close)
        assert [int(rows[0][0]) for rows in await asyncio.gather(*waits)] == list(range(10))
        with pytest.raises(Full):
            await batcher.predict(model, [sample(4)])

    model = Model()
    running(work, max_wait_seconds=5.0, max_batch=50)
