"""Whether smaller or larger values of a metric are better: as it says itself, as its name says, or as the config does."""

import json
import math
import re
from pathlib import Path

import pytest
from running import lockstep, summary
from torchmetrics import MeanAbsolutePercentageError, MeanMetric, MetricCollection, R2Score

from lockstep.base.errors import ConfigError
from lockstep.checkpoint.metric_modes import is_better, mode_by_name
from lockstep.models.metrics.declared_metrics import DeclaredMetric
from lockstep.recipe import recipe as recipes
from lockstep.recipe.components import check_modes, with_modes

INF, NAN = math.inf, math.nan
OWN = """
import torch.nn.functional as F
from torch import nn
from lockstep import LossSum

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
    def forward(self, batch):
        return self.net(batch["image"].flatten(1) / 16)

def build(options, spec):
    return Model()

def loss(outputs, batch):
    total = F.cross_entropy(outputs, batch["label"], reduction="sum")
    return LossSum(total, len(outputs), {"nll": total.detach(), "surprise": total.detach()})
"""


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("min", "loss val_loss mean_absolute_error perplexity nll valid/nll mape msle bits_per_byte wer val.cer"),
        ("min", "brier_score fid kl_divergence smape eval-loss mse val_rmse"),
        (
            "max",
            "accuracy loss_free_accuracy f1 f1_micro val_f1 exact_match entity_f1 r2 auroc bleu recall@5 psnr mAP top5_acc pearson",
        ),
        (
            None,
            "surprise score gap accuracy_gap inception_score loss_ratio neg_mean_squared_error negative_loss ratio x",
        ),
    ],
)
def test_names_that_leave_no_doubt(mode, names):
    assert {name: mode_by_name(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


@pytest.mark.parametrize(
    ("metric", "new", "old", "expected"),
    [
        *[("accuracy", 0.5, None, True), ("loss", 9.0, None, True), ("accuracy", NAN, None, False)],
        *[("accuracy", 0.6, 0.5, True), ("accuracy", 0.5, 0.5, False), ("accuracy", 0.4, 0.5, False)],
        *[("loss", 0.4, 0.5, True), ("loss", 0.5, 0.5, False), ("loss", 0.6, 0.5, False)],
        *[
            ("loss", NAN, 0.5, False),
            ("accuracy", NAN, 0.1, False),
            ("loss", INF, 0.5, False),
            ("psnr", INF, 9.0, False),
        ],
        *[("psnr", INF, None, False), ("psnr", 9.0, INF, True), ("loss", -INF, 0.5, False)],
    ],
)
def test_is_better(metric, new, old, expected):
    """What is not finite never is: once infinite would be best for ever."""
    assert is_better(metric, new, old, mode="auto") is expected


def decided(best, metrics=None, **sections):
    recipe = recipes.Recipe.model_validate(
        {"checkpoint": {"best": best}, "model": {"kind": "user", "file": "own.py"}, **sections}
    )
    declared = {name: DeclaredMetric(metric=metric, arguments=None) for name, metric in (metrics or {}).items()}
    check_modes(decided := with_modes(recipe, declared))
    return decided.checkpoint.mode


def test_a_metric_says_itself():
    """Also against its name, and each of a collection."""
    own = {"quality": MeanAbsolutePercentageError(), "error": R2Score(), "mean": MeanMetric()}
    assert decided("quality", own) == "min"
    assert decided("error", own) == "max"
    both = {"all": MetricCollection({"r": R2Score(), "m": MeanAbsolutePercentageError()})}
    assert (decided("all.r", both), decided("all.m", both)) == ("max", "min")
    with pytest.raises(ConfigError, match=r"nothing says whether .* set checkpoint\.best=-mean or \+mean"):
        decided("mean", own)


def test_the_config_says_it():
    assert (decided("-surprise"), decided("+loss")) == ("min", "max")
    assert decided("surprise", checkpoint={"best": "surprise", "mode": "min"}) == "min"
    train = recipes.Recipe.model_validate(
        {"train": {"stop_metric": "-surprise"}, "model": {"kind": "user", "file": "own.py"}}
    ).train
    assert (train.stop_metric, train.stop_mode) == ("surprise", "min")
    with pytest.raises(ValueError, match=r"best=-nll and mode=max contradict each other"):
        recipes.Recipe.model_validate({"checkpoint": {"best": "-nll", "mode": "max"}})


def test_a_run_keeps_its_best_checkpoint_by_a_sum_of_the_loss_and_refuses_what_leaves_doubt(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text(
        "data: {kind: digits}\nmodel: {kind: user, file: own.py}\noptim: {lr: 0.01}\n"
        "train: {epochs: 2, global_batch: 64}\nlaunch: {processes: 1}\n"
    )
    refused = lockstep(tmp_path, "train", "c.yaml", "checkpoint.best=surprise")
    assert refused.returncode == 2
    assert "set checkpoint.best=-surprise or +surprise" in refused.stderr
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))
    for best, step in (("nll", -1), ("-surprise", -1), ("+surprise", 0)):
        name = f"by{best}".replace("+", "up")
        done = lockstep(tmp_path, "train", "c.yaml", f"run.name={name}", f"checkpoint.best={best}")
        assert done.returncode == 0
        run = tmp_path / "runs" / name
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "evaluation"]
        best_row = next(
            line for line in lockstep(tmp_path, "checkpoints", str(run)).stdout.splitlines() if "best" in line
        )
        assert best_row.split()[0] == str(steps[step]), (best, best_row)
        value = summary(tmp_path, name)["best"]["value"]
        assert summary(tmp_path, name)["best"]["step"] == steps[step]
        told = done.stdout[done.stdout.index("finished after ") :].splitlines()
        assert re.match(r"finished after \d+ steps in 0:0\d:\d\d · digest ", told[0])
        metric = best.lstrip("+-")
        assert told[1] == f"best checkpoint, which export takes: step {steps[step]} · {metric} {value:.4f}"
        assert told[2].startswith("test: ") and f" · {metric} {value:.4f}" in told[2]
    assert summary(tmp_path, "bynll")["status"] == "finished"
    assert "mode: min" in (Path(tmp_path) / "runs" / "bynll" / "recipe.yaml").read_text()
