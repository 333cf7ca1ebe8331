"""Weights of classes in the loss of training."""

import json

import pytest
import torch
import torch.nn.functional as F
from training_runs import config_in, run_on_rank

from lockstep.models.objectives._classification import Classification
from lockstep.models.objectives._token_classification import TokenClassification

WEIGHTS = [0.5, 1.0, 3.0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("objective", [Classification, TokenClassification])
def test_the_loss_is_the_weighted_mean_of_torch(objective, smoothing):
    """Evaluations know no weights."""
    made, words = objective(), () if objective is Classification else (5,)
    logits, label = torch.randn(7, *words, 3, requires_grad=True), torch.randint(3, (7, *words))
    label[0] = -100
    outputs, classes_second = logits, logits.movedim(-1, 1)
    made.class_weights, made.smoothing = torch.tensor(WEIGHTS), smoothing
    loss = made.loss(outputs, {"label": label})
    expected = F.cross_entropy(classes_second, label, torch.tensor(WEIGHTS), label_smoothing=smoothing)
    torch.testing.assert_close(loss.total / loss.count, expected)
    assert loss.sums == {}
    with torch.no_grad():
        plain = made.loss(outputs, {"label": label})
    torch.testing.assert_close(plain.total / plain.count, F.cross_entropy(classes_second, label).detach())
    assert "accuracy" in plain.sums


def run(ranks, folder, weights, world=1, kind="ddp"):
    config = config_in(folder, f"{kind}-{world}", parallel={"kind": kind}, train={"class_weights": weights})
    return ranks(world, run_on_rank, config)[0]


def test_the_number_of_processes_changes_nothing(ranks, tmp_path):
    ways = [(1, "single"), (3, "ddp"), (2, "pipeline")]  # how weights of samples are spread: test_loss_terms.py
    found = {run(ranks, tmp_path, "balanced", *way)["digest"] for way in ways}
    assert len(found) == 1
    assert found != {run(ranks, tmp_path / "even", [1.0] * 10)["digest"]}


def test_even_weights_are_none(ranks, tmp_path):
    for name, weights in (("even", [1.0] * 10), ("none", None)):
        run(ranks, tmp_path / name, weights)
    even, none = ((tmp_path / name / "ddp-1" / "metrics.jsonl").read_text().splitlines() for name in ("even", "none"))
    losses = [[json.loads(line)["loss"] for line in each] for each in (even, none)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_weights_that_do_not_fit_are_refused(ranks, tmp_path):
    assert "has 3 numbers: the classes are 0, 1, 2 and 7 more" in run(ranks, tmp_path, WEIGHTS)
    config = config_in(tmp_path, "gone", data={"limit": 5}, train={"class_weights": "balanced"})
    assert "but no training sample is of" in ranks(1, run_on_rank, config)[0]
