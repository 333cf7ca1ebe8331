"""Micro-batches as they are fetched: equal for any number of workers, each sample once over any number of ranks."""

import gc
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import SampleError
from lockstep.core.reduction.tree import contiguous
from lockstep.data.collate import collate
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.sampler import EvaluationRequests, ShardRequest, TrainingRequests, step_requests

LENGTHS = np.random.default_rng(4).integers(1, 60, 90)


class Augmented:
    """Rows of different length, and random numbers from every generator there is, as augmentation draws them."""

    spec = DataSpec(modality="text", labels=("a", "b"))
    lengths = LENGTHS

    def __init__(self, broken=()):
        self.broken = set(broken)

    def __len__(self):
        return len(LENGTHS)

    def __getitems__(self, indices):
        if bad := self.broken.intersection(indices):
            raise ValueError(f"cannot decode {sorted(bad)}")
        return {
            "input_ids": [np.arange(1, LENGTHS[i] + 1, dtype=np.int32) for i in indices],
            "label": np.array(indices, dtype=np.int64),
            "python": np.array([random.random() for _ in indices]),
            "numpy": np.random.random((len(indices), 2)),
            "torch": torch.rand(len(indices), 3).numpy(),
        }


def owner(rank, world):
    return lambda shards, present: contiguous(rank, world, shards=shards, present=present) or [None]


def order_of(**changes):
    return Order(**{"seed": 3, "samples": 90, "global_batch": 32, "micro_batch": 8, "lengths": LENGTHS, **changes})


def requests_of(order, *, rank=0, world=1, start=0, stop=6):
    return TrainingRequests(order=order, owned=owner(rank, world), start=start, stop=stop)


def loader(requests, *, workers=0, seed=3, source=None):
    return Loader(source or Augmented(), requests, seed=seed, pad_id=0, workers=workers, device=torch.device("cpu"))


def assert_same(some, others):
    some, others = list(some), list(others)
    assert len(some) == len(others) > 0
    for a, b in zip(some, others, strict=True):
        assert (a.step, a.shard, a.indices, a.ghost, a.shards, a.present) == (
            *(b.step, b.shard, b.indices, b.ghost),
            *(b.shards, b.present),
        )
        assert a.batch.keys() == b.batch.keys()
        for name, tensor in a.batch.items():
            assert torch.equal(tensor, b.batch[name]), (a.step, a.shard, name)


def test_workers_change_nothing():
    plain = list(loader(requests_of(order_of())))
    assert_same(plain, loader(requests_of(order_of()), workers=2))
    assert len({tuple(m.batch["python"].tolist()) for m in plain}) == len(plain)


@pytest.mark.parametrize(
    "command",
    [["train", "c.yaml"], pytest.param(["tune", "c.yaml", "--lr", "--steps", "10"], marks=pytest.mark.matrix)],
)
def test_a_temporary_folder_with_a_long_path_is_no_obstacle(tmp_path, command):
    """Unix sockets have paths of at most 107 bytes: workers that cannot open theirs send no batch and no error."""
    (tmp_path / "c.yaml").write_text(
        "data: {kind: digits, limit: 96, workers: 2}\nmodel: {kind: cnn}\ntrain: {steps: 2, global_batch: 16}\n"
    )
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "lockstep", *command]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (0, 1), done.stderr  # ten steps of a sweep may find no rate
    assert "step 2/2" in done.stdout or "rate" in done.stdout, done.stdout


def test_randomness_belongs_to_the_samples():
    """Whoever fetches a micro-batch, after whatever else, draws the same numbers; another seed or epoch draws others."""
    whole = {(m.step, m.shard): m for m in loader(requests_of(order_of()))}
    for rank in range(3):
        random.seed(rank)
        torch.manual_seed(rank)
        mine = list(loader(requests_of(order_of(), rank=rank, world=3, start=2)))
        assert_same(mine, [whole[m.step, m.shard] for m in mine])
    for name in ("python", "numpy", "torch"):
        one = whole[0, 0].batch[name]
        other_seed = next(iter(loader(requests_of(order_of()), seed=4))).batch[name]
        request = step_requests(order_of(), 0, lambda *_: [0])[0]
        other_epoch = next(iter(loader([ShardRequest(**{**vars(request), "epoch": 1})]))).batch[name]
        assert not torch.equal(one, other_seed)
        assert not torch.equal(one, other_epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_come_as_lists(workers):
    order = order_of()
    steps = list(loader(requests_of(order, start=1, stop=5), workers=workers).steps())
    assert [[m.step for m in step] for step in steps] == [[1] * 4, [2] * 4, [3] * 4, [4] * 4]
    expected = [[list(rows) for rows in order.shards(step)] for step in range(1, 5)]
    assert [[list(m.indices) for m in step] for step in steps] == expected
    assert [m.batch["label"].tolist() for m in steps[0]] == expected[0]


def test_no_requests_no_steps():
    assert list(loader(requests_of(order_of(), start=4, stop=4)).steps()) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_early_leaves_no_process(workers):
    steps = loader(requests_of(order_of(), stop=1000), workers=workers).steps()
    next(steps)
    steps.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_samples(workers):
    bad = int(order_of().shards(1)[2][3])
    with pytest.raises(SampleError) as caught:
        list(loader(requests_of(order_of(), start=1), workers=workers, source=Augmented(broken=[bad])))
    said = str(caught.value)
    assert said.startswith(f"sample {bad} of the data could not be fetched (step 2, shard 2):\n  | Traceback (")
    assert said.count('  File "') == said.count(f'  File "{__file__}", line ') == 1, "the user's lines alone"
    rows = order_of().shards(1)[2].tolist()
    assert said.endswith(f"ValueError: cannot decode {[row for row in rows if row == bad]}")


def test_samples_that_fail_only_together_are_all_named():
    class Jealous(Augmented):
        def __getitems__(self, indices):
            if len(indices) > 1:
                raise ValueError("one at a time")
            return super().__getitems__(indices)

    with pytest.raises(
        SampleError, match=r"samples \[\d+, .*\] together of the data could not be fetched \(step 1, sh"
    ):
        list(loader(requests_of(order_of()), workers=0, source=Jealous()))


@pytest.mark.parametrize(
    ("lengths", "width"), [([1], 8), ([8], 8), ([9, 1], 16), ([3, 0, 17], 24), ([128] * 4, 128), ([0], 0)]
)
def test_padding_to_a_multiple_of_eight(lengths, width):
    rows = [np.arange(1, length + 1, dtype=np.int32) for length in lengths]
    batch = collate({"input_ids": rows, "other": rows, "label": np.arange(len(rows))}, pad_id=77)
    assert list(batch) == ["input_ids", "attention_mask", "other", "label"]
    assert {t.dtype for t in batch.values()} == {torch.int64}
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (len(rows), width)
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for i, row in enumerate(rows):
        assert batch["input_ids"][i].tolist() == [*row, *[77] * (width - len(row))]
        assert batch["attention_mask"][i].tolist() == [1] * len(row) + [0] * (width - len(row))
        assert batch["other"][i].tolist() == [*row, *[0] * (width - len(row))]


def test_arrays_keep_their_type():
    columns = {"image": np.zeros((2, 1, 4, 4), np.uint8), "value": np.zeros(2, np.float32)}
    batch = collate(columns)
    assert {name: t.dtype for name, t in batch.items()} == {"image": torch.uint8, "value": torch.float32}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("samples", "micro_batch"), [(1003, 8), (64, 8), (7, 8), (1, 1), (3, 1), (17, 4)])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_evaluation_takes_each_sample_once(world, samples, micro_batch, has_lengths):
    lengths = np.random.default_rng(0).integers(1, 99, samples) if has_lengths else None
    ranks = [
        EvaluationRequests(samples=samples, lengths=lengths, micro_batch=micro_batch, rank=rank, world_size=world)
        for rank in range(world)
    ]
    dealt = [list(requests) for requests in ranks]
    everything = [request for requests in dealt for request in requests if not request.ghost]
    assert sorted(i for request in everything for i in request.indices) == list(range(samples))
    assert sorted(request.shard for request in everything) == list(range(ranks[0].total))
    assert len({len(requests) for requests in dealt}) == 1
    assert all(0 < len(request.indices) <= micro_batch for request in everything)
    everything.sort(key=lambda request: request.shard)
    assert all(len(request.indices) == micro_batch for request in everything[:-1])
    if lengths is not None:
        spans = [(lengths[list(r.indices)].min(), lengths[list(r.indices)].max()) for r in everything]
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_batches_are_those_asked_for(workers):
    requests = EvaluationRequests(samples=90, lengths=LENGTHS, micro_batch=8, rank=1, world_size=2)
    batches = list(loader(requests, workers=workers))
    assert [m.indices for m in batches] == [request.indices for request in requests]
    assert [m.batch["label"].tolist() for m in batches] == [list(request.indices) for request in requests]


CASES = [
    {},
    {"lengths": None},
    {"micro_batch": 5},
    {"samples": 33, "lengths": None},
    {"samples": 5, "lengths": None},
    {"samples": 90, "global_batch": 7, "micro_batch": 7},
]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ranks_together_run_the_whole_order(world, case):
    order = order_of(**case)
    dealt = [list(requests_of(order, rank=rank, world=world, stop=9)) for rank in range(world)]
    for step in range(9):
        shards = order.shards(step)
        full = {number: tuple(rows.tolist()) for number, rows in enumerate(shards) if len(rows)}
        of_step = [[request for request in requests if request.step == step] for requests in dealt]
        real = [request for requests in of_step for request in requests if not request.ghost]
        assert sorted((r.shard, r.indices) for r in real) == sorted(full.items())
        for requests in of_step:
            assert requests, "every rank has something to run with"
            ghosts = [request for request in requests if request.ghost]
            assert ghosts in ([], requests)
            assert len(ghosts) <= 1
            assert all(full[request.shard] == request.indices for request in requests)
            assert {request.present for request in requests} == {frozenset(full)}
            assert {(request.shards, request.epoch) for request in requests} == {(len(shards), order.epoch(step))}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_world_can_change_at_any_step(case):
    """Worlds of 2, 5, 1, 3 and 4 take over from each other in mid-epoch: three epochs, each sample three times."""
    order = order_of(**case)
    stop = 3 * order.steps_per_epoch
    cuts = [0, *sorted(np.random.default_rng(2).integers(0, stop + 1, 4).tolist()), stop]
    seen = []
    for world, start, end in zip([2, 5, 1, 3, 4], cuts, cuts[1:], strict=False):
        for rank in range(world):
            requests = requests_of(order, rank=rank, world=world, start=start, stop=end)
            seen += [(r.step, i) for r in requests if not r.ghost for i in r.indices]
    steps = [sorted(i for rows in order.shards(step) for i in rows.tolist()) for step in range(stop)]
    assert sorted(seen) == [(step, i) for step, rows in enumerate(steps) for i in rows]
    assert sorted(i for _, i in seen) == sorted(3 * list(range(order.samples)))


class Collecting(Augmented):
    """Its process collects garbage whenever it reads a sample."""

    def __getitems__(self, indices):
        gc.collect()
        return super().__getitems__(indices)


def test_workers_do_not_destroy_what_the_training_process_has_left(tmp_path):
    """Such as a process group in a reference cycle, whose threads a forked process does not have."""

    class Left:
        def __init__(self):
            self.own = self

        def __del__(self):
            (tmp_path / str(os.getpid())).touch()

    gc.disable()
    try:
        Left()
        assert len(list(loader(requests_of(order_of()), workers=1, source=Collecting()))) == 24
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
