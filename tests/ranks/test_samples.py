"""Data sets as strangers bring them: plain ones of one sample at a time, broken ones, empty ones, endless ones."""

import json
import os
import re
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch
from members import further
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from training_runs import config_in, run_on_rank

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError
from lockstep.data.collate import collate
from lockstep.data.loader import Samples
from lockstep.data.torch_dataset import as_source


class Listed(Dataset):
    """Any samples."""

    def __init__(self, samples, **more):
        self.samples = samples
        vars(self).update(more)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def opened(dataset, own=None):
    return as_source(dataset, own, "the split")


def batch_of(dataset, own=None):
    source = opened(dataset, own)
    return collate(source.__getitems__([1, 0]), spec=source.spec)


Pair = namedtuple("Pair", ["signal", "target"])
PICTURE = Image.new("RGB", (5, 4))


@pytest.mark.parametrize(
    ("dataset", "columns", "spec"),
    [
        (
            Listed([(PICTURE, 0), (PICTURE, 1)], classes=["a", "b"]),
            ["image", "label"],
            ("image", ("a", "b"), (3, 4, 5)),
        ),
        (Listed([(torch.ones(1, 6, 6), 1.5)] * 2), ["image", "label"], ("image", (), (1, 6, 6))),
        (TensorDataset(torch.ones(2, 7), torch.ones(2)), ["input", "label"], ("any", (), None)),
        (TensorDataset(torch.ones(2, 7)), ["input"], ("any", (), None)),
        (Listed([np.ones(3), np.ones(3)]), ["input"], ("any", (), None)),
        (Listed([3.0, 4.0]), ["input"], ("any", (), None)),
        (Listed([Pair(np.ones(3), 2.0)] * 2), ["signal", "target"], ("any", (), None)),
        (Listed([{"x": [1, 2], "y": 1}] * 2), ["x", "y"], ("any", (), None)),
        (
            Subset(Listed([(np.ones(2), 1)] * 3, classes=("n", "y")), [2, 1]),
            ["input", "label"],
            ("any", ("n", "y"), None),
        ),
        (Listed([(1, 1)] * 2, spec=DataSpec(modality="own", labels=("x",))), ["input", "label"], ("own", ("x",), None)),
    ],
)
def test_a_plain_data_set_is_taken(dataset, columns, spec):
    source = opened(dataset)
    assert (source.spec.modality, source.spec.labels, source.spec.image_shape) == spec
    batch = batch_of(dataset)
    assert list(batch) == columns
    assert {len(column) for column in batch.values()} == {2}


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Listed([(np.ones(2), 1)]), "nothing says how many classes there are: give the data set"),
        (Listed([(1, 2, 3)]), "samples of 3 parts without names: give dicts"),
        (
            type("Stream", (IterableDataset,), {"__iter__": lambda _: iter(())})(),
            "the split is a stream without a sample",
        ),
        (iter([1]), "a list_iterator without a length"),
        (None, "a NoneType without a length"),
        ({1, 2}, "a set without __getitem__"),
    ],
)
def test_what_is_no_data_set_is_told(dataset, said):
    with pytest.raises(DataError, match=said):
        opened(dataset)


def test_fewer_samples_than_asked_are_told():
    def most(self, indices):
        return [self[index] for index in indices if index != 1]

    dataset = type("Cut", (Listed,), {"__getitems__": most})([{"x": 1.0}, {"x": 2.0}])
    for ask in (batch_of, lambda each: Samples(each, None, "it").__getitems__([1, 0])):
        with pytest.raises(DataError, match="__getitems__ of Cut returned 1 samples for 2 indices"):
            ask(dataset)
    nothing = type("None", (Listed,), {"__getitems__": lambda self, indices: []})([{"x": 1.0}])
    with pytest.raises(DataError, match="returned 0 samples for 1 indices"):
        opened(nothing)


def with_lengths(lengths):
    dataset = Listed([{"x": 1.0}, {"x": 2.0}])
    dataset.lengths = lengths
    return dataset


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (np.array(["cat", "dog"]), ("cat", "dog")),
        (range(2), ("0", "1")),
        ("01", ("0", "1")),
        ({"dog": 1, "cat": 0}, ("cat", "dog")),
        ({1: "dog", 0: "cat"}, ("cat", "dog")),
    ],
)
def test_classes_may_be_named_in_several_ways(classes, names):
    assert opened(Listed([(1, 1)] * 2, classes=classes)).spec.labels == names


@pytest.mark.parametrize("classes", [3, {"cat", "dog"}, lambda: ["cat"], {"cat": 1, "dog": 2}, ["cat", "cat"]])
def test_what_names_no_classes_is_told(classes):
    with pytest.raises(DataError, match="in the order of"):
        opened(Listed([(1, 1)] * 2, classes=classes))


@pytest.mark.parametrize("labels", [3, "abc", (0, 1), ("a", "a"), {"a", "b"}])
def test_a_description_with_other_things_than_names_is_told(labels):
    with pytest.raises(DataError, match="different names"):
        DataSpec(modality="any", labels=labels)


def test_a_description_of_another_kind_is_told():
    with pytest.raises(DataError, match="spec = DataSpec"):
        opened(Listed([(1, 1)] * 2, lengths=None, spec={"labels": ("a", "b")}, __getitems__=None))


def test_lengths_may_be_a_list():
    found = opened(with_lengths([3, 1])).lengths
    assert found.tolist() == [3, 1] and found.dtype == np.int64


@pytest.mark.parametrize("wrong", [[3], [3, -1], [3.5, 1.0], ["a", "b"], 3])
def test_what_is_no_length_of_each_sample_is_told(wrong):
    with pytest.raises(DataError, match="is not a length for each of its 2 samples"):
        opened(with_lengths(wrong))


def test_samples_with_different_columns_are_named():
    with pytest.raises(
        DataError, match=re.escape("sample 0 of the split has the columns ['b'], but sample 1 has ['a']")
    ):
        batch_of(Listed([{"b": 1}, {"a": 1}]))


def test_an_own_collate_gets_the_samples_as_they_are():
    def own(samples):
        texts, numbers = zip(*samples, strict=True)
        return {"length": torch.tensor([len(text) for text in texts]), "all": torch.tensor(sum(numbers, []))}

    batch = batch_of(Listed([("abc", [1.0]), ("d", [2.0, 3.0])]), own)
    assert {name: column.tolist() for name, column in batch.items()} == {"length": [1, 3], "all": [2, 3, 1]}


USER = '''
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep import LossSum

BAD = {3: "x", 17: None, 40: "dtype", **{i: "x" for i in range(100, 116)}}

class Numbers(Dataset):
    """A regression of random numbers; some samples cannot be read, in several ways."""
    def __init__(self, count, bad):
        self.count, self.bad = count, bad
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        x = torch.linspace(index % 7, 1 + index % 5, 6)
        if self.bad and BAD.get(index) == "x":
            raise OSError(f"sample {index} is torn")
        if self.bad and BAD.get(index) == "dtype":
            x = x.double()
        return {"x": None if self.bad and index == 17 else x, "y": float(index % 11)}

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 12), nn.Linear(12, 1)
    def forward(self, batch):
        return self.head(torch.tanh(self.first(batch["x"])))[:, 0]

def build(options, spec):
    assert spec.labels == ()
    return Network()

def loss(outputs, batch):
    return LossSum(((outputs - batch["y"]) ** 2).sum(), len(outputs))

def source(options, split):
    return Numbers(options["train" if split == "train" else "test"], options.get("bad", True))
'''


@pytest.fixture
def user(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(USER)

    def config(name, data=(), options=(), **sections):
        sizes = {"train": 120, "test": 30, **dict(options)}
        own = {"kind": "user", "file": str(file), "options": sizes, "limit": None, **dict(data)}
        return config_in(tmp_path, name, data=own, model={"kind": "user", "file": str(file)}, **sections)

    return config


def test_bad_samples_are_left_out_alike_on_any_world(ranks, tmp_path, user):
    """Torn samples, one that is None, one of another dtype, micro-batches of torn ones alone: the same weights
    everywhere, and the same list."""
    skipping = {"on_bad_sample": "skip"}
    found = [
        ranks(1, run_on_rank, user("a", skipping, parallel={"kind": "single"}))[0],
        ranks(2, run_on_rank, user("b", {**skipping, "workers": 1}))[0],
        ranks(3, run_on_rank, user("c", skipping))[0],
        ranks(2, run_on_rank, user("d", skipping, parallel={"kind": "fsdp"}))[0],
    ]
    assert {summary["status"] for summary in found} == {"finished"}
    assert len({summary["digest"] for summary in found}) == 1
    torn = [3, 17, 40, *range(100, 116)]
    expected = {"test": {"count": 2, "indices": [3, 17]}, "train": {"count": len(torn), "indices": torn}}
    assert [summary["bad_samples"] for summary in found] == [expected] * 4
    listed = (tmp_path / "a" / "logs" / "bad-samples-rank-0.jsonl").read_text().splitlines()
    reasons = {(one["split"], one["sample"]): one["reason"] for one in map(json.loads, listed)}
    assert len(reasons) == len(listed) == len(torn) + 2, "each once"
    assert reasons["train", 3] == "OSError: sample 3 is torn"
    assert "is None" in reasons["train", 17]
    assert "float64" in reasons["train", 40]


def test_a_micro_batch_of_bad_samples_alone_counts_for_nothing(ranks, user):
    """Micro-batches of one sample: what cannot be read is as if it were not there."""
    train = {"epochs": 1, "global_batch": 20, "micro_batch": 1}
    found = [
        ranks(
            world, run_on_rank, user(f"{world}{kind}", {"on_bad_sample": "skip"}, train=train, parallel={"kind": kind})
        )
        for world, kind in ((1, "single"), (3, "ddp"), (2, "fsdp"))
    ]
    assert len({summaries[0]["digest"] for summaries in found}) == 1
    assert found[0][0]["bad_samples"]["train"]["count"] > 10


def test_a_resumed_run_lists_and_weighs_the_same(ranks, user):
    whole = ranks(1, run_on_rank, user("whole", {"on_bad_sample": "skip"}))[0]
    ranks(2, run_on_rank, user("cut", {"on_bad_sample": "skip"}), "auto", 3)
    again = ranks(1, run_on_rank, user("cut", {"on_bad_sample": "skip"}))[0]
    assert [again[key] for key in ("digest", "bad_samples")] == [whole[key] for key in ("digest", "bad_samples")]


def test_image_files_that_cannot_be_read_are_left_out(ranks, tmp_path):
    """Of a folder, which is decoded whole: the first file among them, whose size all others would have."""
    generator = np.random.default_rng(0)
    for number in range(40):
        file = tmp_path / f"images/{'ab'[number % 2]}/{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(file)
        if number in (0, 7, 30):
            file.write_bytes(file.read_bytes()[:60])
    data = {"kind": "files", "train": str(tmp_path / "images"), "test_fraction": 0.3, "channels": 1}

    def config(name, **more):
        return config_in(tmp_path, name, data={**data, **more}, model={"kind": "cnn"})

    found = [
        ranks(1, run_on_rank, config("a", on_bad_sample="skip"))[0],
        ranks(3, run_on_rank, config("b", on_bad_sample="skip"))[0],
    ]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["numeric_recipe"]["data.contents"] == found[1]["numeric_recipe"]["data.contents"]
    assert found[0]["bad_samples"] == found[1]["bad_samples"]
    assert sum(split["count"] for split in found[0]["bad_samples"].values()) == 3
    listed = (tmp_path / "a/logs/bad-samples-rank-0.jsonl").read_text()
    assert re.search(r"00\.png cannot be read as an image", listed)
    (message,) = ranks(1, run_on_rank, config("c"))
    assert re.search(r"DataError: .*00\.png cannot be read as an image .*: replace or remove it", message), message


def test_a_bad_sample_ends_the_run_by_default(ranks, user):
    for message in ranks(2, run_on_rank, user("stop")):
        assert re.search(
            r"(SampleError: sample \d+ of the (training|test) split|the column 'x' of sample (17|40) )", message
        )


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_samples_are_told(ranks, user, split):
    (message,) = ranks(1, run_on_rank, user("none", options={split: 0}))
    assert message.startswith(f"DataError: the {split} split of data.kind=user holds no sample: check")


ENDLESS = """
import resource
import sys
import json
import torch.distributed as dist
from lockstep.run.tasks.train import TrainTask
from lockstep.recipe.recipe import Recipe
from lockstep.core.host.signals import SignalWatch
from lockstep.base import trust
from lockstep.base.world import World

trust.accept([trust.OPTION])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
job = TrainTask(Recipe.model_validate(json.loads(sys.argv[1])), World(rank=0, size=1, local_rank=0, local_size=1), SignalWatch())
job.run("never", allow_drift=False)
job.close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("limit", [50_000_000, *further(None)])
def test_very_many_virtual_samples_take_no_memory(user, limit):
    """10^8 samples; whatever is made for each of them (8 bytes: 800 MB) would show."""
    train = {"epochs": None, "steps": 3}
    config = user(
        "many", {"limit": limit}, {"train": 10**8, "bad": False}, train=train, checkpoint={"every_steps": None}
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, json.dumps(config)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 300_000, "kB"
