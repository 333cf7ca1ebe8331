"""The user's own loss and metrics for a model of Lockstep's own kinds."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from running import lockstep
from training_runs import config_in, run_on_rank

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.models._own_functions import build
from lockstep.models.cnn import Config
from lockstep.models.gpt import Config as GPTConfig

FOCAL = """
import torch.nn.functional as F
import torchmetrics
from lockstep import LossSum

def loss(outputs, batch):
    plain = F.cross_entropy(outputs, batch["label"], reduction="none")
    focal = (1 - (-plain).exp()) ** 2 * plain
    return LossSum(focal.sum(), len(focal), {"plain": plain.sum().detach()})
"""
METRICS = """
def metrics(spec):
    return {"top3": torchmetrics.classification.MulticlassAccuracy(len(spec.labels), top_k=3, average="micro")}
"""
TOP3 = {"best": "top3"}


def written(folder, text=FOCAL + METRICS):
    file = folder / "mine.py"
    folder.mkdir(exist_ok=True)
    file.write_text(text)
    trust.own(trust.code_with_imports(file))
    return file


def run_with_file(config, file):
    trust.own(trust.code_with_imports(Path(file)))
    return run_on_rank(config)


def run(ranks, folder, file, world=1, kind="ddp", **sections):
    model = {"kind": "cnn", "file": str(file)}
    config = config_in(folder, f"{kind}-{world}", parallel={"kind": kind}, model=model, **sections)
    return ranks(world, run_with_file, config, str(file))[0]


def test_the_number_of_processes_changes_nothing(ranks, tmp_path):
    ways = [(1, "single"), (3, "ddp"), (2, "fsdp"), (2, "pipeline")]
    found = [run(ranks, tmp_path, written(tmp_path), *way, checkpoint=TOP3) for way in ways]
    assert len({each["digest"] for each in found}) == 1
    assert {"top3", "accuracy", "plain"} <= found[0]["evaluation"].keys()
    assert found[0]["digest"] != ranks(1, run_on_rank, config_in(tmp_path, "usual"))[0]["digest"]


def test_the_loss_is_that_of_the_file(tmp_path):
    """Evaluations measure accuracy, too; training adds what the file's loss returns and no more."""
    spec = DataSpec(modality="image", image_shape=(1, 8, 8), labels=("a", "b", "c"))
    model = build(Config(kind="cnn", file=written(tmp_path)), spec)
    batch = {"image": torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8), "label": torch.arange(6) % 3}
    logits = torch.randn(6, 3, requires_grad=True)
    plain = F.cross_entropy(logits, batch["label"], reduction="none")
    found = model.loss(logits, batch)
    torch.testing.assert_close(found.total, ((1 - (-plain).exp()) ** 2 * plain).sum())
    assert found.sums.keys() == {"plain"}
    with torch.no_grad():
        assert model.loss(logits, batch).sums.keys() == {"plain", "accuracy"}
    assert model(batch).shape == (6, 3)


def test_targets_may_be_others(ranks, tmp_path):
    """Here -1 for samples that the loss leaves out."""
    text = FOCAL.replace('batch["label"]', 'batch["label"].clamp_min(0)').replace("def loss", "def own") + (
        "def loss(outputs, batch):\n    return own(outputs, {**batch, 'label': batch['label'] - 1})\n"
    )
    batch = {"label": torch.tensor([-1, 0, 1, 2])}
    spec = DataSpec(modality="image", image_shape=(1, 8, 8), labels=("a", "b", "c"))
    model = build(Config(kind="cnn", file=written(tmp_path, text)), spec)
    with torch.no_grad():
        assert model.loss(torch.randn(4, 3), batch).sums.keys() == {"plain"}
    assert run(ranks, tmp_path, written(tmp_path, text))["status"] == "finished"


def test_a_language_model_tells_no_perplexity_of_another_loss(tmp_path):
    text = "from lockstep import LossSum\ndef loss(outputs, batch):\n    return LossSum(outputs.square().sum(), 1)\n"
    spec = DataSpec(modality="tokens", vocabulary=20, context=8)
    model = build(GPTConfig(kind="gpt", file=written(tmp_path, text), width=16, layers=1, heads=2), spec)
    outputs = torch.randn(2, 8, 20)
    assert model.loss(outputs, {}).total == outputs.square().sum()
    assert model.derived({"loss": 1.0}) == {}


def test_an_export_is_evaluated_by_the_same_loss_and_metrics(tmp_path):
    written(tmp_path)
    (tmp_path / "c.yaml").write_text("data: {kind: digits, limit: 200}\nmodel: {kind: cnn, file: mine.py}\n")
    settings = ("run.name=a", "train.steps=8", "train.global_batch=32", "train.micro_batch=8", "checkpoint.best=top3")
    done = lockstep(tmp_path, "train", "c.yaml", *settings)
    assert done.returncode == 0, done.stderr
    done = lockstep(tmp_path, "export", "runs/a")
    assert done.returncode == 0, done.stderr
    found = []
    for path in ("runs/a", "runs/a/export"):
        done = lockstep(tmp_path, "evaluate", path, "--to", "evaluated")
        assert done.returncode == 0, done.stderr
        found.append(json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())["metrics"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert {"loss", "top3", "accuracy", "plain"} <= found[0].keys()


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("def build(options, spec): ...", {}, "has a function build(), which model.kind=cnn does not call"),
        ("def los(outputs, batch): ...", {}, "has none of the functions that model.kind=cnn takes from a file: loss"),
        ("from torch import nn\nloss = nn.MSELoss()", {}, "is an nn.MSELoss, which is a mean over the micro-batch"),
        ("def loss(outputs, batch): return outputs.sum()", {}, "returned a tensor of shape [], which does not say how"),
        (FOCAL, {"train": {"class_weights": "balanced"}}, "the model's own loss decides: leave it out"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, tmp_path, text, settings, message):
    assert message in run(ranks, tmp_path, written(tmp_path, text), **settings)
