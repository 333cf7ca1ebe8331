"""Mistakes of a first own model or data set that trained all the same, or ended in PyTorch's words."""

import json
import os
import subprocess
import sys

import pytest
from running import lockstep, typed

FILE = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Points(Dataset):
    def __init__(self, names="ab"):
        self.classes = list(names)
        self.x = np.random.default_rng(0).normal(size=(80, 6)).astype(np.float32)

    def __len__(self):
        return 80

    def __getitem__(self, row):
        return {"x": self.x[row], "label": int(self.x[row].sum() > 0), "number": row}


class Named(Points):
    def __getitem__(self, row):
        name = ("cat", "dog", "owl", "fox", "bee")[row % 5]
        return {"x": self.x[row], "label": self.classes.index(name)}


class Network(nn.Module):
    def __init__(self, kind, classes):
        super().__init__()
        self.kind, self.body, self.extra = kind, nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head, self.step = nn.Linear(6, 9 if kind == "wide" else classes), 0

    def forward(self, batch):
        h = self.body(batch if self.kind == "tensor" else batch["image" if self.kind == "image" else "x"])
        if self.kind == "skips" and (not self.training or torch.rand(()) < 0.4):
            h = h + self.extra(h)
        logits = self.head(h)
        return {"logits": logits, "scores": h} if self.kind == "dict" else {"a": h} if self.kind == "none" else logits


def source(options, split):
    kind = options["kind"]
    if kind == "names" and split == "test":
        return Points("bac")
    if kind == "set":
        return Named(list({"cat", "dog", "owl", "fox", "bee"}))
    data = random_split(Points(), [0.8, 0.2])[split == "test"]
    data.classes = ["a", "b"]
    if kind == "split":
        with open(f"{split}.txt", "a") as file:
            print(*sorted(data.indices), file=file)
    return DataLoader(data) if kind == "loader" else data


def build(options, spec):
    return Network(options["kind"], len(spec.labels))


def swapped(batch, outputs):
    return batch["label"]
"""
SETTINGS = {"train": {"steps": 12, "global_batch": 16, "micro_batch": 8}, "checkpoint": {"every_steps": None}}


@pytest.fixture
def train(tmp_path):
    def run(kind, *words, file=FILE):
        (tmp_path / "mine.py").write_text(file)
        both = {"kind": "user", "file": "mine.py", "options": {"kind": kind}}
        config = {"data": both, "model": both, **SETTINGS, "parallel": {"find_unused": True}}
        (tmp_path / "c.yaml").write_text(json.dumps(config))
        done = lockstep(tmp_path, "train", "c.yaml", f"run.name={kind}", *words)
        return done.returncode, done.stdout + done.stderr

    return run


def summary(folder, name):
    return json.loads((folder / "runs" / name / "summary.json").read_text())


def test_batchnorm_of_a_block_that_rank_0_leaves_out(train, tmp_path):
    """Of its first uses, one process may see none."""
    for processes in (1, 2, 3):
        code, said = train("skips", f"launch.processes={processes}", f"run.name=w{processes}")
        assert code == 0, said
    assert len({summary(tmp_path, name)["digest"] for name in ("w1", "w2", "w3")}) == 1


def test_a_random_split_divides_alike(train, tmp_path):
    for seed in (1, 2):
        code, said = train("split", f"run.seed={seed}", f"run.name=seed-{seed}", "launch.processes=2")
        assert code == 0, said
    rows = [{*(tmp_path / f"{split}.txt").read_text().splitlines()} for split in ("train", "test")]
    assert [len(each) for each in rows] == [1, 1]  # of all processes and runs
    assert not {*rows[0].pop().split()} & {*rows[1].pop().split()}


def test_classes_in_the_order_of_a_set(train, tmp_path):
    """By default each interpreter has another. Of a user's own seed the order is known to the checkpoint."""
    train("set", "--dry-run")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["lockstep", "train", "c.yaml", "run.name=torchrun"]
    found = subprocess.run([*torchrun, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    done = lockstep(tmp_path, "train", "c.yaml", "run.name=one", "launch.processes=1")
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path, "one")["digest"] == summary(tmp_path, "torchrun")["digest"]
    assert summary(tmp_path, "torchrun")["world_size"] == 2
    assert lockstep(tmp_path, "evaluate", "runs/one").returncode == 0
    other = typed(tmp_path, "export", "runs/one", env={**os.environ, "PYTHONHASHSEED": "3"})
    assert other.returncode == 2, other.stdout + other.stderr
    assert "now: the same in another order, in which the model's outputs would be misread" in other.stderr


def test_logits_among_several_outputs_need_no_loss(train, tmp_path):
    assert [train(kind, "launch.processes=1")[0] for kind in ("dict", "plain")] == [0, 0]
    assert summary(tmp_path, "dict")["digest"] == summary(tmp_path, "plain")["digest"]
    assert "accuracy" in summary(tmp_path, "dict")["evaluation"]


def test_a_head_that_is_too_wide_is_told(train):
    code, said = train("wide", "launch.processes=1")
    assert (code, "the model gives 9 outputs for the 2 classes of the data" in said) == (0, True), said


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("names", "of the training split are a, b, and those of the test split are b, a, c: give both the same"),
        (
            "loader",
            "is a DataLoader without __getitem__ and __getitems__: add one, or return the data set of a DataLoader",
        ),
        ("none", "takes outputs [samples, classes], and the model gives several, with none named logits"),
        ("image", "forward(batch) gets a dict of tensors, here with: x, label, number"),
        ("tensor", "forward(batch) gets a dict of tensors, here with: x, label, number"),
        ("swapped", "loss(outputs, batch) gets what forward() has returned, and then the batch, a dict of tensors"),
    ],
)
def test_what_was_meant_is_told(train, kind, says):
    file = FILE.replace("def swapped", "def loss") if kind == "swapped" else FILE
    code, said = train(kind, "launch.processes=1", file=file)
    assert code in (1, 2) and says in said, said


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.batch_size=32", "did you mean train.global_batch, the samples of a step on all processes together"),
        ("optim.learning_rate=0.1", "did you mean optim.lr?"),
        ("train.num_workers=2", "did you mean data.workers?"),
        ("evaluate.metrics=[macro_f1]", "(there is: accuracy, loss, f1, confusion)"),
    ],
)
def test_names_of_other_trainers_lead_to_ours(train, setting, says):
    code, said = train("plain", setting)
    assert (code, says in said) == (2, True), said
