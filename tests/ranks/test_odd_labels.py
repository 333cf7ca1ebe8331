"""Labels of every kind that people have, and micro-batches of one sample: the right numbers, or a line that says how."""

import pytest
import torch
from training_runs import config_in, run_on_rank

from lockstep.base.errors import DataError
from lockstep.models.objectives._classification import build

LOGITS = torch.eye(4)[:, :3] * 5
FITS = {
    "int64": torch.tensor([0, 1, 2, 0]),
    "int32": torch.tensor([0, 1, 2, 0], dtype=torch.int32),
    "int8": torch.tensor([0, 1, 2, 0], dtype=torch.int8),
    "uint16": torch.tensor([0, 1, 2, 0], dtype=torch.uint16),
}
REFUSED = {
    "floats": (torch.tensor([0.0, 1.0, 2.0, 0.0]), "the column 'label' is float32 of shape [4], where outputs [4, 3]"),
    "one-hot": (
        torch.eye(4, 3, dtype=torch.int64),
        "is int64 of shape [4, 3], where outputs [4, 3] need whole numbers",
    ),
    "a column": (torch.tensor([[0], [1], [2], [0]]), "is int64 of shape [4, 1]"),
    "from one": (torch.tensor([1, 2, 3, 1]), "holds 3, but the model gives 3 classes, whose indices are 0 to 2"),
    "minus one": (torch.tensor([-100, 1, -1, 0]), "holds -1, but the model gives 3 classes"),
}


@pytest.mark.parametrize("kind", FITS)
def test_whole_numbers_of_every_type(kind):
    found, plain = (build().loss(LOGITS, {"label": label}) for label in (FITS[kind], FITS["int64"]))
    assert float(found.total) == float(plain.total)
    assert int(found.sums["accuracy"]) == 4


def test_a_bool_is_one_of_two_classes():
    found = build().loss(LOGITS[:2, :2], {"label": torch.tensor([False, True])})
    assert int(found.sums["accuracy"]) == 2


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_named_with_what_is_needed(kind):
    label, said = REFUSED[kind]
    with pytest.raises(DataError) as refused:
        build().loss(LOGITS, {"label": label})
    assert said in str(refused.value)


FILE = """
import numpy as np
import torch
from torch import nn

from lockstep import DataSpec


class Points:
    lengths = None
    spec = DataSpec(modality="points", labels=("a", "b", "c"))

    def __init__(self, n, kind, split):
        self.n, self.kind = n, kind
        self.wrong = int(kind.split()[1]) if kind.startswith(split) else None

    def __len__(self):
        return self.n

    def __getitems__(self, rows):
        x = np.random.default_rng(0).normal(size=(self.n, 3, 4)).astype(np.float32)[list(rows)]
        y = x.sum(2).argmax(1)
        y[np.array(rows) == self.wrong] = -1 if self.kind.endswith("minus") else 3
        return {"x": x, "label": {"ignored": np.where(y == 2, -100, y), "bytes": y.astype(np.uint16)}.get(self.kind, y)}


class Network(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm = nn.BatchNorm1d(3 if kind == "axes" else 12)
        self.head, self.is_flat = nn.Linear(12, 3), kind != "axes"

    def forward(self, batch):
        x = batch["x"].flatten(1) if self.is_flat else batch["x"]
        return self.head(self.norm(x).flatten(1))


def source(options, split):
    return Points(options["samples"], options["kind"], split)


def build(options, spec):
    return Network(options["kind"])
"""


@pytest.fixture
def train(ranks, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)

    def run(kind, samples, world):
        both = {"kind": "user", "file": str(file), "options": {"kind": kind, "samples": samples}}
        length = {"epochs": 2, "global_batch": 8, "micro_batch": 4}
        config = config_in(tmp_path, "a", data={**both, "limit": None}, model=both, train=length)
        return ranks(world, run_on_rank, config)[0]

    return run


@pytest.mark.parametrize("world", [1, 2])
def test_a_lone_last_sample_is_refused_before_the_first_step(train, world, tmp_path):
    assert "BatchNorm needs more than one sample, and the last micro-batch of an epoch has one" in train("", 21, world)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("kind", "samples"), [("axes", 21), ("", 22), ("ignored", 22), ("bytes", 22)])
def test_what_can_be_trained_is(train, kind, samples):
    assert train(kind, samples, 1)["status"] == "finished"


@pytest.mark.parametrize(
    ("kind", "world", "split", "has_begun"),
    [
        ("train 13", 1, "the training split of data.kind=user", True),
        ("train 17 minus", 2, "the training split of data.kind=user", False),
        ("test 2", 2, "the test split", False),
        ("test 22", 1, "the test split", True),
    ],
)
def test_a_wrong_label_is_told_with_its_sample(train, tmp_path, kind, world, split, has_begun):
    """Also where it comes late: by then steps with right ones were done."""
    wrong = -1 if kind.endswith("minus") else 3
    said = f"sample {kind.split()[1]} of {split}: the column 'label' holds {wrong}, but the model gives 3 classes"
    assert f"DataError: {said}, whose indices are 0 to 2" in train(kind, 24, world)
    assert (tmp_path / "a" / "metrics.jsonl").exists() == has_begun
