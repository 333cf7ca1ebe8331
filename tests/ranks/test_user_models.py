"""Runs of models, losses and metrics that a stranger may bring: outputs of any form, no labels, metrics that raise."""

import json

import pytest
from comparing import compare
from members import further
from places import OWN
from training_runs import config_in, lines, run_on_rank

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.checkpoint import layout
from lockstep.inference import trained_model
from lockstep.models import _user as user

FILE = """
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef
from transformers.utils import ModelOutput

from lockstep import DataSpec, LossSum

HERE = Path(__file__).parent


class Numbers:
    spec = DataSpec(modality="numbers", labels=())
    lengths = None

    def __init__(self, samples, seed, empty):
        generator = np.random.default_rng(seed)
        self.x = generator.normal(size=(samples, 4)).astype(np.float32)
        self.target = (self.x.sum(1) + generator.normal(size=samples)).astype(np.float32)
        self.weight = np.full(samples, 0 if empty else 1, dtype=np.int64)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        rows = list(indices)
        return {"x": self.x[rows], "target": self.target[rows], "weight": self.weight[rows]}


@dataclass
class Inner:
    mean: Tensor
    note: str = "mean"


@dataclass
class Two:
    inner: Inner
    spread: Tensor


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


@dataclass
class Of(ModelOutput):
    mean: Tensor = None
    spread: Tensor = None


FORMS = {
    "tensor": lambda mean, spread: torch.stack([mean, spread], 1),
    "dict": lambda mean, spread: {"spread": spread, "mean": {"of": [mean]}},
    "tuple": lambda mean, spread: (mean, None, spread),
    "dataclass": lambda mean, spread: Two(Inner(mean), spread),
    "namedtuple": lambda mean, spread: Pair(mean, spread),
    "transformers": lambda mean, spread: Of(mean=mean, spread=spread),
}
MEANS = {
    "tensor": lambda o: (o[:, 0], o[:, 1]),
    "dict": lambda o: (o["mean"]["of"][0], o["spread"]),
    "tuple": lambda o: (o[0], o[2]),
    "dataclass": lambda o: (o.inner.mean, o.spread),
    "namedtuple": lambda o: o,
    "transformers": lambda o: (o.mean, o["spread"]),
}


class Network(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Dropout(0.1))
        self.form = form

    def forward(self, batch):
        mean, spread = self.layers(batch["x"]).unbind(1)
        return FORMS[self.form](mean, spread)


def build(options, spec):
    global FORM
    FORM = options.get("form", "tensor")
    return Network(FORM)


def source(options, split):
    return Numbers(96 if split == "train" else 50, split == "test", split == "train" and options.get("empty", False))


def loss(outputs, batch):
    mean, spread = MEANS[FORM](outputs)
    weight = batch["weight"]
    error = (mean - batch["target"]).square() * weight
    off = (spread - 1).square() * weight
    return LossSum((error + 0.1 * off).sum(), weight.sum(), {"accuracy": (error < 1).sum(), "off": off.sum()})


def target(outputs, batch):
    if (HERE / "broken").exists():
        raise ZeroDivisionError("the metric is broken")
    return MEANS[FORM](outputs)[0], batch["target"]


def metrics(spec):
    return {"mse": (MeanSquaredError(), target), "pearson": (PearsonCorrCoef(), target)}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def own(file, name, *, options=(), **sections):
    """A run of the user's file: 8 steps of 24 samples in micro-batches of 4."""
    base = {
        "data": {"kind": "user", "file": str(file), "options": dict(options), "limit": None},
        "model": {"kind": "user", "file": str(file), "options": dict(options)},
        "train": {"epochs": 2, "global_batch": 24, "micro_batch": 4},
        "optim": {"lr": 0.02},
        "checkpoint": {"every_steps": None},
    }
    return config_in(file.parent, name, **{k: {**base.get(k, {}), **sections.get(k, {})} for k in {*base, *sections}})


def manifest(folder):
    return layout.read_manifest(layout.listed(folder / "checkpoints")[0])


def test_a_metric_stops_every_world_at_the_same_step(ranks, file):
    sections = {"train": {"epochs": 40, "stop_metric": "mse", "stop_patience": 1}, "optim": {"lr": 0.1}}
    sections |= {"evaluate": {"every_steps": 1}, "checkpoint": {"best": "pearson", "every_steps": None}}
    found = {world: ranks(world, run_on_rank, own(file, f"w{world}", **sections))[0] for world in (1, 2, 3)}
    for summary in found.values():
        assert summary["status"] == "stopped early" and 2 < summary["steps"] < 160, summary
        assert {k: summary[k] for k in ("steps", "digest", "evaluation", "chain")} == {
            k: found[1][k] for k in ("steps", "digest", "evaluation", "chain")
        }
    folder = file.parent
    assert lines(folder, "w3") == lines(folder, "w1")
    assert [p.name for p in layout.listed(folder / "w2" / "checkpoints")] == [
        p.name for p in layout.listed(folder / "w1" / "checkpoints")
    ]
    assert compare(folder / "w1", folder / "w3")[0] == 0

    log = folder / "w2" / "metrics.jsonl"
    value = json.dumps(found[1]["evaluation"]["pearson"])
    log.write_text(log.read_text().replace(value, value[:-1] + str((int(value[-1]) + 1) % 10)))
    code, out, _ = compare(folder / "w1", folder / "w2")
    assert code == 1 and f"different: at step {found[1]['steps']}" in out[2] and "evaluation pearson" in out[3]

    ranks(2, run_on_rank, own(file, "longer", **{**sections, "train": {**sections["train"], "stop_patience": 2}}))
    code, out, _ = compare(folder / "w1", folder / "longer")
    assert code == 1
    assert out[2].startswith(f"different ends: A was stopped early after step {found[1]['steps']}, B ")


STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "pipeline": 2}


@pytest.mark.parametrize(
    "form",
    [
        "dataclass",
        "transformers",
        *further("dict", "tuple", "namedtuple"),
    ],
)
def test_outputs_of_any_form(ranks, file, form):
    expected = ranks(1, run_on_rank, own(file, "tensor"))[0]
    for kind, world in STRATEGIES.items():
        changed = own(file, kind, options={"form": form}, parallel={"kind": kind})
        found = ranks(world, run_on_rank, changed)[0]
        assert found["status"] == "finished"
        assert (kind, found["digest"], found["evaluation"]) == (kind, expected["digest"], expected["evaluation"])


def test_sums_of_the_loss_are_evaluated_where_there_are_no_labels(ranks, file):
    found = ranks(2, run_on_rank, own(file, "all"))[0]["evaluation"]
    assert list(found) == ["loss", "accuracy", "off", "mse", "pearson"]
    assert 0 < found["accuracy"] < 1
    assert found["loss"] == pytest.approx(found["mse"] + 0.1 * found["off"])
    some = ranks(1, run_on_rank, own(file, "some", evaluate={"metrics": ["mse", "off"]}))[0]["evaluation"]
    assert some == {name: found[name] for name in ("loss", "off", "mse")}


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"train": {"stop_metric": "mes"}}, "train.stop_metric: there is no metric 'mes' — did you mean 'mse'?"),
        ({"checkpoint": {"best": "f1"}}, "checkpoint.best: there is no metric 'f1'"),
        ({"evaluate": {"metrics": ["mse", "of"]}}, "evaluate.metrics: there is no metric 'of' — did you mean 'off'?"),
    ],
)
def test_decisions_by_what_is_not_measured_are_told_before_training(ranks, file, sections, error):
    found = ranks(2, run_on_rank, own(file, "wrong", **sections))
    assert all(each.startswith(f"ConfigError: {error}") for each in found), found
    assert "(there is: accuracy, loss, mse, off, pearson)" in found[0]
    assert not (file.parent / "wrong" / "summary.json").exists()


def test_an_evaluation_that_raises_costs_nothing(ranks, file, monkeypatch):
    """Saved first, then said with the user's frames; the resume begins with that evaluation."""
    sections = {"evaluate": {"every_steps": 3}, "checkpoint": {"best": "mse", "every_steps": None}}
    whole = ranks(1, run_on_rank, own(file, "whole", **sections))[0]
    ranks(2, run_on_rank, own(file, "r", **sections), "auto", 4)
    (file.parent / "broken").touch()
    early = ranks(2, run_on_rank, own(file, "r", **sections))
    assert all(
        each.startswith("EvaluationFailed: an evaluation was tried with the first samples before training, and failed:")
        for each in early
    )
    assert "ZeroDivisionError: the metric is broken" in early[0] and 'own.py", line' in early[0]
    (file.parent / "broken").unlink()
    found = ranks(3, run_on_rank_that_breaks, own(file, "r", **sections), 6, str(file.parent / "broken"))
    assert all("the state after step 6 has been saved, and a resume begins with this evaluation" in e for e in found)
    saved = manifest(file.parent / "r")
    assert (saved.step, saved.metrics) == (6, {})
    (file.parent / "broken").unlink()
    again = ranks(2, run_on_rank, own(file, "r", **sections))[0]
    for name in ("status", "steps", "digest", "evaluation", "chain"):
        assert again[name] == whole[name], name
    assert lines(file.parent, "r") == lines(file.parent, "whole")
    assert compare(file.parent / "whole", file.parent / "r")[0] == 0


class Breaks:
    """Breaks the metric when a step is done."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def notice(self, event):
        if getattr(event, "step", 0) == self.step and type(event).__name__ == "StepDone":
            open(self.path, "w").close()

    def close(self):
        pass


def run_on_rank_that_breaks(config, step, path):
    from lockstep.run.tasks.train import TrainTask

    plain = TrainTask.subscribe_observers
    try:
        TrainTask.subscribe_observers = lambda job: (plain(job), job.bus.subscribe(Breaks(step, path)))[0]
        return run_on_rank(config)
    finally:
        TrainTask.subscribe_observers = plain


def test_a_step_that_counts_nothing_is_skipped(ranks, file):
    """Every step of this one; also after a resume, on any world, and with fp16's scaler."""
    for precision in ("fp32", "fp16"):
        train = {"precision": precision, "ema": 0.9}
        one = ranks(1, run_on_rank, own(file, f"one-{precision}", options={"empty": True}, train=train))[0]
        assert (one["status"], one["steps"], one["skipped_steps"]) == ("finished", 8, 8)
        config = own(file, f"two-{precision}", options={"empty": True}, train=train)
        ranks(2, run_on_rank, config, "auto", 3)
        two = ranks(3, run_on_rank, config)[0]
        for name in ("digest", "training_digest", "chain", "skipped_steps"):
            assert two[name] == one[name], name
        assert one["digest"] == one["training_digest"], "a skipped step changes nothing, and no average of it"
        assert [line["loss"] for line in lines(file.parent, f"one-{precision}") if line["kind"] == "step"] == [0] * 8
        manifests = layout.read_manifest(layout.listed(file.parent / f"two-{precision}" / "checkpoints")[0])
        assert manifests.digest == two["digest"]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ("outputs.sum()", "returned a tensor of shape [], which does not say how many samples"),
        ("(outputs.sum(), 4)", "returned a tuple, which does not say"),
        ("0.5", "returned the number 0.5, which"),
        ("None", "returned nothing, which"),
        ("LossSum(outputs, 4)", "LossSum.total is a tensor of shape [4, 2]: it is the sum of the losses"),
        ("LossSum(0.5, 4)", "LossSum.total is the number 0.5"),
        ("LossSum(outputs.sum(), None)", "LossSum.count is nothing: it is how many samples"),
        ("LossSum(outputs.sum(), outputs)", "LossSum.count is a tensor of shape [4, 2]"),
        ("LossSum(outputs.sum(), 4, {'a': outputs})", "it is {'a': a tensor of shape [4, 2]}"),
    ],
)
def test_a_loss_that_is_no_sum_is_answered_with_what_helps(ranks, file, returned, error):
    file.write_text(
        FILE.replace("    mean, spread = MEANS[FORM](outputs)\n    weight", f"    return {returned}\n    weight")
    )
    (message,) = ranks(1, run_on_rank, own(file, "r"))
    assert message.startswith("ModelError: ") and error in message, message
    assert (
        'LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), len(outputs))' in message
        or "sums" in error
        or "{" in error
    )


def test_sums_may_be_plain_numbers(file):
    file.write_text(FILE + "\n\ndef loss(outputs, batch):\n    return LossSum(outputs.sum()[None], 4.0, {'n': 4})\n")
    import torch

    trust.own(trust.code_with_imports(file))
    spec = DataSpec(modality="numbers", labels=())
    model = user.build(user.Config(kind="user", file=file), spec)
    found = model.loss(model({"x": torch.ones(4, 4)}), {})
    assert (found.total.shape, found.count, int(found.sums["n"])) == ((), 4.0, 4)


def test_the_digest_covers_what_is_used(ranks, file):
    """With a moving average it is that of the average, which is evaluated and exported; the trained weights have one."""
    plain = ranks(1, run_on_rank, own(file, "plain"))[0]
    assert "training_digest" not in plain
    found = {}
    for kind, world in STRATEGIES.items():
        config = own(file, f"ema-{kind}", train={"ema": 0.9}, parallel={"kind": kind})
        found[kind] = ranks(world, run_on_rank, config)[0]
        assert found[kind]["training_digest"] == plain["digest"], kind
        assert found[kind]["digest"] == found["single"]["digest"] != plain["digest"]
        assert manifest(file.parent / f"ema-{kind}").digest == found[kind]["digest"]
    facts, _ = trained_model.export(file.parent / "ema-ddp", ["export.kind=safetensors"], file.parent / "export")
    assert facts.digest == found["ddp"]["digest"]
    code, out, _ = compare(file.parent / "plain", file.parent / "ema-ddp")
    assert code == 1 and "different: at step 4" in out[2]


@pytest.mark.parametrize("world, kind", [(1, "single"), (3, "ddp"), (3, "fsdp"), (2, "pipeline"), *further((2, "ddp"))])
def test_sums_that_only_some_micro_batches_report(ranks, tmp_path, world, kind):
    """A sum is 0 where it is not reported, whichever process would have to, and whenever it comes up first."""
    model = {"kind": "user", "file": str(OWN / "uneven.py")}
    config = config_in(tmp_path, "run", model=model, parallel={"kind": kind}, train={"epochs": 3})
    found = ranks(world, run_on_rank, config)[0]
    steps = [line for line in lines(tmp_path, "run") if line["kind"] == "step"]
    for name in ("zeros", "nines_right", "odd", "even", "rare"):
        assert any(name in line for line in steps)
        assert all(line.get(name, 0) == line[f"all_{name}"] for line in steps)
    assert "rare" not in steps[0]
    assert found["evaluation"]["zeros"] == found["evaluation"]["all_zeros"] > 0


def test_a_loss_may_be_zero_where_there_is_nothing_to_learn_and_no_other_constant(ranks, tmp_path):
    def run(loss, world=1, kind="ddp"):
        options = {"kind": "user", "file": str(OWN / "uneven.py")}
        model, folder = {**options, "options": {"loss": loss}}, tmp_path / f"{loss}-{world}-{kind}"
        found = ranks(world, run_on_rank, config_in(folder, "run", model=model, parallel={"kind": kind}))
        return folder, found[0]

    found = [run("of ones", *way) for way in [(1, "single"), (3, "ddp"), (2, "fsdp"), (2, "pipeline")]]
    assert len({summary["digest"] for _, summary in found}) == 1
    losses, masked = ([line.get("loss") for line in lines(folder, "run")] for folder in (found[0][0], run("masked")[0]))
    assert losses == pytest.approx(masked, rel=1e-4)
    for way in [(1, "single"), (2, "fsdp")]:
        assert "the loss of a micro-batch does not depend on any trained weight" in run("detached", *way)[1]
