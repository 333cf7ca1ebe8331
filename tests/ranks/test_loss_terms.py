"""A loss of several means: terms that count something else than samples, over the whole global batch."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from strategy_runs import CPU, SHARDS, Chain
from training_runs import config_in, run_on_rank

from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.numerics.seeds import seed_all
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes
from lockstep.training.step import step

MODEL = '''
"""Digits, and of the even ones how much ink they take."""

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import LossSum


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 16)
        self.digit, self.ink = nn.Linear(16, 10), nn.Linear(16, 1)

    def forward(self, batch):
        x = torch.relu(self.second(torch.relu(self.first(batch["image"].flatten(1) / 255))))
        return {"logits": self.digit(x), "ink": self.ink(x)[:, 0]}


def loss(outputs, batch):
    ink = batch["image"].float().mean((1, 2, 3)) / 255
    off = (outputs["ink"] - ink).square() * is_even(batch)
    total = F.cross_entropy(outputs["logits"], batch["label"], reduction="sum")
    return LossSum(total, len(ink), terms={NAMED: LossSum(off.sum(), is_even(batch).sum())})


def is_even(batch):
    return batch["label"] % 2 == 0


def term_counts(batch):
    return {"ink": is_even(batch).sum()TOLD}


def build(options, spec):
    return Network()
'''


@pytest.fixture
def config(tmp_path):
    def written(name, *, named='"ink"', counts="term_counts", told="", **sections):
        file = tmp_path / f"{name}.py"
        file.write_text(MODEL.replace("NAMED", named).replace("TOLD", told).replace("def term_counts", f"def {counts}"))
        return config_in(tmp_path, name, model={"kind": "user", "file": str(file)}, **sections)

    return written


def test_terms_give_the_same_bits_and_figures_everywhere(ranks, tmp_path, config):
    layouts = {
        "a": (1, {"kind": "single"}),
        "c": (3, {"kind": "ddp"}),
        "d": (2, {"kind": "fsdp"}),
        "e": (2, {"kind": "pipeline"}),
    }
    found = {
        name: ranks(world, run_on_rank, config(name, parallel=parallel))[0]
        for name, (world, parallel) in layouts.items()
    }
    assert len({summary["digest"] for summary in found.values()}) == 1
    lines = {name: (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in found}
    steps = {name: [json.loads(line) for line in each] for name, each in lines.items()}
    for kind in ("step", "evaluation"):
        figures = {
            name: [(line["ink"], line["loss"]) for line in each if line["kind"] == kind] for name, each in steps.items()
        }
        assert figures["a"]
        assert all(each == figures["a"] for each in figures.values()), kind


def test_terms_have_to_be_counted_before(ranks, config):
    (message,) = ranks(1, run_on_rank, config("a", named='"inc"'))
    assert re.search(
        r"ModelError: the loss has the terms \['inc'\], but term_counts\(batch\) gives .*\['ink'\]", message
    )
    (message,) = ranks(1, run_on_rank, config("c", named='"ink"', told=" * 2"))
    assert re.search(r"ModelError: the term 'ink' of the loss counts (\d+) in shard 0 of step 1, .* let both", message)
    (message,) = ranks(1, run_on_rank, config("b", counts="other_counts"))
    assert re.search(r"ModelError: the loss has the terms \['ink'\], but there is no function term_counts", message)


class Two(Chain):
    """Beside the classes, the size of outputs for those of class 2."""

    def loss(self, outputs, batch):
        size = outputs.square().sum(1)[batch["label"] == 2]
        return LossSum(super().loss(outputs, batch).total, len(outputs), terms={"size": LossSum(size.sum(), len(size))})

    def term_counts(self, batch):
        return {"size": (batch["label"] == 2).sum()}


def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(3, 8, generator=generator), "label": torch.randint(0, 3, (3,), generator=generator)}
        for _ in range(SHARDS)
    ]


def stepped():
    """The weights after a step of plain SGD."""
    seed_all(3)
    recipe = recipes.Recipe.model_validate({"optim": {"kind": "sgd", "lr": 0.1, "weight_decay": 0, "momentum": 0}})
    every = frozenset(range(SHARDS))
    state = build.distribute(recipe, Two(), lambda: batches()[0], total_steps=9, device=CPU)
    rate = state.rate(0)
    micro_batches = [
        MicroBatch(step=0, shard=shard, indices=(0, 1, 2), batch=batches()[shard], shards=SHARDS, present=every)
        for shard in range(SHARDS)
    ]
    outcome = step(state, micro_batches, clip=None)
    weights = {name: p.detach().clone() for name, p in state.module.named_parameters()}
    return rate, weights, float(outcome.mean(outcome.loss.total)), float(outcome.mean(outcome.loss.sums["size"]))


def test_the_gradient_is_that_of_the_means_over_the_whole_batch(ranks):
    ((rate, weights, loss, size),) = ranks(1, stepped)
    seed_all(3)
    model, whole = Two(), {name: torch.cat([each[name] for each in batches()]) for name in ("x", "label")}
    outputs = model(whole)
    expected = outputs.square().sum(1)[whole["label"] == 2].mean()
    total = F.cross_entropy(outputs, whole["label"]) + expected
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-6)
    assert size == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], (parameter - rate * parameter.grad).detach(), rtol=1e-5, atol=1e-7)
