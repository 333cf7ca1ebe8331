"""Data sets without random access: the same samples and weights on any number of processes, workers and resumes."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import lockstep, started, summary, wait_for_steps, workers
from torch.utils.data import IterableDataset
from training_runs import config_in, run_on_rank

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError, SampleError
from lockstep.data.dataset import measurable, open_source, spread_evenly, stream_of
from lockstep.data.order import Blocks, StreamOrder
from lockstep.data.stream import Stream
from lockstep.data.torch_dataset import as_source
from lockstep.recipe.recipe import of_sections

CODE = """
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from lockstep import DataSpec


class Numbers(IterableDataset):
    spec = DataSpec(modality="table", labels=("a", "b"))

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def rows(self, first=0):
        for number in range(first, self.count):
            x = np.random.default_rng([self.epoch, number]).standard_normal(4).astype(np.float32)
            yield {"x": x, "label": int(x.sum() > 0)}

    def __iter__(self):
        return self.rows()


class Skipping(Numbers):
    def skip(self, count):
        return self.rows(count)


class Measured(Numbers):
    def __len__(self):
        return self.count


class Random(Numbers):
    # shuffles and adds noise with the generators of the process, and takes its share of a loader's workers

    def __iter__(self):
        rows = list(self.rows())
        random.shuffle(rows)
        info = get_worker_info()
        for row in rows[info.id :: info.num_workers] if info else rows:
            yield row | {"x": row["x"] + torch.rand(4).numpy()}


class OfRank(Numbers):
    def __iter__(self):
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for number, row in enumerate(self.rows()):
            if number % size == rank:
                yield row


class Unseeded(Numbers):
    def __iter__(self):
        rows = list(self.rows())
        np.random.default_rng().shuffle(rows)
        yield from rows


class Failing(Numbers):
    def rows(self, first=0):
        for number, row in enumerate(super().rows(first)):
            if number == 70:
                raise OSError("the shard is damaged")
            yield row


def source(options, split):
    if split == "test":
        return Measured(20)
    return globals()[options.get("kind", "Numbers")](options.get("count", 100))


def collate(samples):
    x = torch.tensor(np.stack([sample["x"] for sample in samples]))
    return {"x": x + 0.1 * torch.randn_like(x), "label": torch.tensor([sample["label"] for sample in samples])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, batch):
        return self.body(batch["x"])


def build(options, spec):
    return Net()
"""


@pytest.fixture
def code(tmp_path):
    """A Python file with streams and a model."""
    (tmp_path / "own.py").write_text(CODE)
    return str(tmp_path / "own.py")


def config_of(code, folder, name, kind="Numbers", data=None, **sections):
    """20 steps of 16 samples in micro-batches of 4: three passes over 100 samples, and a part of the next."""
    data = {"kind": "user", "file": code, "limit": None, "shuffle_block": 24, "options": {"kind": kind}} | (data or {})
    sections.setdefault("train", {"epochs": None, "steps": 20, "global_batch": 16, "micro_batch": 4})
    return config_in(folder, name, data=data, model={"kind": "user", "file": code}, **sections)


class Counting(IterableDataset):
    """(pass, number) of each sample; what it draws at random comes third."""

    def __init__(self, count, **more):
        self.count, self.epoch, self.opened = count, 0, 0
        vars(self).update(more)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.opened += 1
        return ((self.epoch, number, random.random()) for number in range(self.count))


class CountingOn(Counting):
    def skip(self, count):
        return ((self.epoch, number, 0.0) for number in range(count, self.count))


class CountingKnown(Counting):
    def __len__(self):
        return self.count


SPEC = DataSpec(modality="own")
KINDS = [Counting, CountingOn, CountingKnown]


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 30), st.integers(1, 50), st.lists(st.integers(0, 150), min_size=1))
def test_a_position_gives_one_sample_whatever_was_read_before(kind, count, held, positions):
    stream = Stream(kind(count), "the split")
    stream.train(1000, seed=5, held_samples=held)
    found = [stream.__getitems__([position])[0] for position in positions]
    assert [sample[:2] for sample in found] == [divmod(position, count) for position in positions]
    for sample, position in zip(found, positions, strict=True):
        stream.rewind()
        assert stream.__getitems__([position])[0] == sample


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("limit", "length"), [(4, 4), (30, 10)])
def test_a_limit_ends_each_pass(kind, limit, length):
    for position in (25, 3, 8, 41):
        stream = Stream(kind(10), "the split")
        stream.limit_to(limit)
        stream.train(1000, seed=5, held_samples=1)
        assert stream.__getitems__([position])[0][:2] == divmod(position, length)


def test_samples_that_are_near_are_read_once():
    stream = Stream(CountingKnown(1000), "the split")
    stream.train(1000, seed=5, held_samples=50)
    order = StreamOrder(
        seed=1, samples=1000, global_batch=10, micro_batch=3, blocks=Blocks(size=20, samples=1000, is_endless=False)
    )
    for step in range(40, 90):
        for rows in order.shards(step):
            stream.__getitems__(rows.tolist())
    assert stream.dataset.opened == 1
    assert len(stream._held) <= 50


def test_reading_leaves_the_generators_as_they_were():
    stream = Stream(Counting(10), "the split")
    random.seed(3)
    before = random.getstate()
    stream.__getitems__([4])
    assert random.getstate() == before


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 70), st.integers(0, 2**63 - 1))
def test_an_epoch_holds_each_of_its_positions_once_and_near_its_place(samples, batch, size, seed):
    order = StreamOrder(
        seed=seed,
        samples=samples,
        global_batch=batch,
        micro_batch=3,
        blocks=Blocks(size=size, samples=samples, is_endless=False),
    )
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        rows = np.concatenate([order._drawn(epoch, step % order.steps_per_epoch, 1) for step in steps])
        assert sorted(rows) == list(range(epoch * samples, (epoch + 1) * samples))
        assert ((rows - epoch * samples) // size == np.arange(samples) // size).all()
        assert sorted(rows) == sorted(row for step in steps for shard in order.shards(step) for row in shard)


def endless(steps):
    blocks = Blocks(size=50, samples=steps * 8, is_endless=True)
    return StreamOrder(seed=3, samples=steps * 8, global_batch=8, micro_batch=4, blocks=blocks)


def test_more_steps_leave_the_first_ones_as_they_are():
    few, many = endless(9), endless(1000)
    for step in range(9):
        assert [rows.tolist() for rows in few.shards(step)] == [rows.tolist() for rows in many.shards(step)]


def test_the_order_never_changes_silently():
    assert [[rows.tolist() for rows in endless(2).shards(step)] for step in range(2)] == [
        [[30, 32, 19, 45], [8, 42, 47, 48]],
        [[14, 7, 28, 44], [25, 6, 29, 20]],
    ]


@pytest.mark.parametrize(("kind", "worlds"), [("Random", (1, 2, 3)), ("Skipping", (1, 3)), ("Measured", (1, 3))])
def test_the_same_weights_on_any_world_and_any_number_of_workers(ranks, code, tmp_path, kind, worlds):
    found = [
        ranks(world, run_on_rank, config_of(code, tmp_path, f"{world}", kind, {"workers": number}))[0]
        for world, number in zip(worlds, (0, 2, 0), strict=False)
    ]
    assert found[0]["samples_seen"] == (296 if kind == "Measured" else 320), "two ragged steps, or none"
    assert len({each["digest"] for each in found}) == 1
    assert all(each["evaluation"] == found[0]["evaluation"] for each in found)


def test_skipping_changes_no_bit_of_a_resumed_run_but_shuffling_does(ranks, code, tmp_path):
    def digest(name, **data):
        return ranks(1, run_on_rank, config_of(code, tmp_path, name, data=data))[0]["digest"]

    whole = digest("whole")
    config = config_of(code, tmp_path, "resumed", "Skipping", {"workers": 1})
    assert "stopped by a signal after step 9" in ranks(2, run_on_rank, config, "auto", 8)[0]
    assert ranks(1, run_on_rank, config)[0]["digest"] == whole
    assert digest("other", shuffle_block=1) != whole


@pytest.mark.parametrize(
    ("kind", "data", "steps"),
    [("Measured", {}, 14), ("Numbers", {"samples_per_epoch": 33}, 6), ("Numbers", {"limit": 40}, 6)],
)
def test_a_known_length_gives_epochs(ranks, code, tmp_path, kind, data, steps):
    train = {"epochs": 2, "steps": None, "global_batch": 16, "micro_batch": 4}
    found = ranks(2, run_on_rank, config_of(code, tmp_path, "run", kind, data, train=train))[0]
    assert (found["steps"], found["epochs"]) == (steps, 2)


def test_a_stream_survives_a_kill(code, tmp_path):
    sections = config_of(code, tmp_path / "runs", "killed", "Random", {"workers": 1})
    sections["train"]["steps"] = 60
    sections |= {"checkpoint": {"every_steps": 4}, "launch": {"max_restarts": 0}, "observe": {"log_every": 1}}
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    whole = lockstep(tmp_path, "train", "c.yaml", "run.name=whole", "launch.processes=1")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    process = started(tmp_path, "train", "c.yaml", "launch.processes=2")
    wait_for_steps(tmp_path / "runs/killed", 10)
    workers(process)[1].kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    again = lockstep(tmp_path, "train", "c.yaml", "launch.processes=3")
    assert "resumed after step" in again.stdout, again.stdout + again.stderr
    assert summary(tmp_path, "killed")["digest"] == summary(tmp_path, "whole")["digest"]


def test_what_differs_between_ranks_is_told(ranks, code, tmp_path):
    found = ranks(2, run_on_rank, config_of(code, tmp_path, "run", "OfRank"))
    assert all("is a stream that gives other samples to rank 1 than to rank 0" in each for each in found), found
    assert "Lockstep itself divides them" in found[0]


@pytest.mark.parametrize(
    ("kind", "data", "more", "said"),
    [
        ("Unseeded", {}, {}, "is a stream that gives other samples when it is read again: __iter__ has to begin anew"),
        ("Failing", {}, {}, "sample 70 of the train split that source() in"),
        ("Numbers", {"on_bad_sample": "skip"}, {}, "data.on_bad_sample=skip leaves samples out by their number"),
        ("Numbers", {"options": {"count": 0}}, {}, "is a stream without a sample"),
        (
            "Numbers",
            {},
            {"train": {"epochs": 1}},
            "is a stream without a length: set train.steps, or data.samples_per_epoch",
        ),
    ],
)
def test_mistakes_are_told(ranks, code, tmp_path, kind, data, more, said):
    found = ranks(1, run_on_rank, config_of(code, tmp_path, "run", kind, data, **more))[0]
    assert said in found, found


def test_samples_per_epoch_is_for_streams(ranks, tmp_path):
    (tmp_path / "map.py").write_text("def source(options, split):\n    return [{'x': 1.0, 'label': 1.0}] * 9\n")
    data = {"kind": "user", "file": str(tmp_path / "map.py"), "samples_per_epoch": 5, "limit": None}
    found = ranks(1, run_on_rank, config_in(tmp_path, "run", data=data))[0]
    assert "samples_per_epoch belongs to a stream, and the training split has random access" in found


def opened(dataset):
    return as_source(dataset, None, "the split")


def test_a_split_to_be_measured_needs_an_end():
    with pytest.raises(DataError, match="the split is a stream without a length: set evaluate.limit"):
        measurable(opened(Counting(5, spec=SPEC)), None)
    source = measurable(opened(Counting(5, spec=SPEC)), 8)
    assert len(source) == 8
    for _ in range(2):
        with pytest.raises(DataError, match=re.escape("ended after 5 samples, and 8 are to be measured: set evaluate")):
            stream_of(source).__getitems__([5])


def test_an_iterable_data_set_with_random_access_is_no_stream():
    class Indexed(CountingKnown):
        def __getitem__(self, index):
            return {"x": float(index)}

    source = opened(Indexed(9))
    assert stream_of(source) is None
    assert source.__getitems__([7, 2]) == {"x": [7.0, 2.0]}


@pytest.mark.parametrize("count", [4, 6])
def test_passes_of_different_lengths_are_told(count):
    class Wrong(CountingKnown):
        def __len__(self):
            return 5

    stream = Stream(Wrong(count), "the split")
    stream.train(100, seed=0, held_samples=3)
    with pytest.raises(DataError, match=f"pass 1 over the split gave {count} samples, but a pass has 5"):
        stream.__getitems__([7])


def test_an_error_of_the_stream_names_its_sample():
    class Broken(Counting):
        def __iter__(self):
            yield {"x": 1.0}
            raise OSError("no such shard")

    stream = Stream(Broken(3), "the split")
    for _ in range(2):
        with pytest.raises(SampleError, match=r"sample 1 of the split could not be read:\n(.|\n)*no such shard"):
            stream.__getitems__([1])
    assert stream.__getitems__([0]) == [{"x": 1.0}]


def test_the_first_samples_stand_for_a_stream():
    few = spread_evenly(opened([{"x": n} for n in range(100)]), 10)
    assert few.__getitems__([3])["x"] == [30]

    class Rows(CountingKnown):
        def __iter__(self):
            return ({"x": number} for _, number, _ in super().__iter__())

    few = spread_evenly(opened(Rows(100)), 10)
    assert len(few) == 10
    assert few.__getitems__([3, 12])["x"] == [3, 12], "the next epoch goes on"


def test_a_stream_is_no_part_of_a_mix(code):
    parts = [{"kind": "user", "file": code}] * 2
    recipe = of_sections({"data": {"kind": "mix", "sources": parts}, "model": {"kind": "user", "file": code}})
    trust.own(trust.code_with_imports(Path(code)))
    with pytest.raises(DataError, match="source 0 of the mix is a stream"):
        open_source(recipe.data, "train")
