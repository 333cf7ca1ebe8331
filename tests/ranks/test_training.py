"""A run as a whole, in real process groups: one digest, resume, decisions that all ranks share."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from members import further
from training_runs import config_in, lines, run_on_rank

from lockstep.base.world import World
from lockstep.data.dataset import Subset, open_source
from lockstep.data.order import Order
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes
from lockstep.recipe.recipe import Recipe

VARIANTS = {
    "fp32": {},
    "bf16, momentum": {"train": {"precision": "bf16"}, "optim": {"kind": "sgd", "lr": 0.05}},
    "fp16 with scaler, no clipping": {"train": {"precision": "fp16"}, "optim": {"clip": None}},
    "moving average, cosine": {"train": {"ema": 0.9}, "schedule": {"shape": "cosine", "warmup": 0.2}},
    "loader workers": {"data": {"workers": 2}},
}


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.core) if v.startswith("fp") else v for v in VARIANTS]
)
def test_one_digest_and_the_same_lines_on_any_number_of_processes(ranks, tmp_path, variant):
    config = VARIANTS[variant]
    found = {}
    for world in (1, 2, 3):
        summary = ranks(world, run_on_rank, config_in(tmp_path, f"w{world}", **config))[0]
        assert summary["status"] == "finished"
        assert summary["steps"] == 14
        assert summary["samples_seen"] == 400
        found[world] = summary["digest"], summary["evaluation"], lines(tmp_path, f"w{world}")
    assert found[1] == found[2] == found[3]


def test_single_is_ddp_with_one_process(ranks, tmp_path):
    alone = ranks(1, run_on_rank, config_in(tmp_path, "single", parallel={"kind": "single"}))[0]
    ddp = ranks(2, run_on_rank, config_in(tmp_path, "ddp"))[0]
    assert alone["digest"] == ddp["digest"]


EXTRA = {"train": {"ema": 0.9, "precision": "fp16"}, "data": {"workers": 1}}


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """Its summary and what it has logged."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return ranks(2, run_on_rank, config_in(folder, "whole", **EXTRA))[0], lines(folder, "whole")


@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=pytest.mark.core), 8, *further(4, 7, 11)])
def test_interrupted_and_resumed_is_the_uninterrupted_run(ranks, tmp_path, uninterrupted, stop_after):
    whole, logged = uninterrupted
    message = ranks(2, run_on_rank, config_in(tmp_path, "parts", **EXTRA), "auto", stop_after)[0]
    assert message.startswith("Interrupted: stopped by a signal after step")
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["status"] == "interrupted"
    resumed = ranks(3, run_on_rank, config_in(tmp_path, "parts", **EXTRA))[0]
    assert resumed["digest"] == whole["digest"]
    assert resumed["evaluation"] == whole["evaluation"]
    assert lines(tmp_path, "parts") == logged


FROZEN = """
from torch import nn


def build(options, spec):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model[1].requires_grad_(False)
    return Model(model)


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, batch):
        return self.body(batch["image"] / 16)
"""


def test_frozen_parameters_are_no_obstacle_to_a_resume(ranks, tmp_path):
    (tmp_path / "frozen.py").write_text(FROZEN)
    model = {"kind": "user", "file": str(tmp_path / "frozen.py")}
    whole = ranks(1, run_on_rank, config_in(tmp_path, "whole", model=model))[0]
    ranks(2, run_on_rank, config_in(tmp_path, "parts", model=model), "auto", 4)
    assert ranks(1, run_on_rank, config_in(tmp_path, "parts", model=model))[0]["digest"] == whole["digest"]


def test_a_finished_run_is_not_trained_again(ranks, tmp_path):
    first = ranks(1, run_on_rank, config_in(tmp_path, "a"))[0]
    again = ranks(1, run_on_rank, config_in(tmp_path, "a"))[0]
    assert (again["digest"], again["steps"], again["evaluation"]) == (first["digest"], 14, first["evaluation"])
    assert len(lines(tmp_path, "a")) == 16


def test_never_resume_keeps_what_is_there(ranks, tmp_path):
    ranks(1, run_on_rank, config_in(tmp_path, "a"))
    before = sorted((tmp_path / "a" / "checkpoints").iterdir())
    (message,) = ranks(1, run_on_rank, config_in(tmp_path, "a"), "never")
    assert message.startswith("CheckpointError")
    assert "run.name" in message
    assert sorted((tmp_path / "a" / "checkpoints").iterdir()) == before


@pytest.mark.core
def test_a_damaged_checkpoint_is_passed_over(ranks, tmp_path):
    whole = ranks(2, run_on_rank, config_in(tmp_path, "a"))[0]
    newest = sorted((tmp_path / "a" / "checkpoints").iterdir())[-1]
    part = next(newest.glob("__0*"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    again = ranks(2, run_on_rank, config_in(tmp_path, "a"))[0]
    assert again["digest"] == whole["digest"]
    for folder in (tmp_path / "a" / "checkpoints").iterdir():
        part = next(folder.glob("__0*"))
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    for message in ranks(2, run_on_rank, config_in(tmp_path, "a")):
        assert "is whole" in message


BAD_MODEL = """
import torch
from torch import nn

class Explodes(nn.Module):
    \"\"\"The loss of one sample is not a number.\"\"\"
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
    def forward(self, batch):
        x = batch["image"].flatten(1) / 255
        bad = x.sum(1, keepdim=True) > THRESHOLD
        return torch.where(bad, float("nan"), 1.0) * self.head(x)

def build(options, spec):
    return Explodes()
"""


def exploding(tmp_path):
    """A model that fails on the brightest of the 200 samples, and that sample's number."""
    section = recipes.Recipe.model_validate({"data": {"limit": 200}}).data
    source = open_source(section, "train")
    light = source.__getitems__(range(len(source)))["image"].reshape(200, -1).sum(1) / 255
    brightest = int(light.argmax())
    threshold = (sorted(light)[-1] + sorted(light)[-2]) / 2
    file = tmp_path / "explodes.py"
    file.write_text(BAD_MODEL.replace("THRESHOLD", str(threshold)))
    return {"kind": "user", "file": str(file)}, brightest


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_is_not_finite_stops_and_says_where(ranks, tmp_path, world):
    model, brightest = exploding(tmp_path)
    config = config_in(tmp_path, "a", model=model, observe={"log_every": 4}, checkpoint={"every_steps": 1})
    for message in ranks(world, run_on_rank, config):
        assert message.startswith("NonFiniteLoss")
        (number,) = [int(w.rstrip(":")) for w in message.split("in step ")[1].split()[:1]]
        shard = int(message.split("shard ")[1].split(",")[0])
        assert f"rank {shard * world // 4}" in message
        order = Order(seed=0, samples=200, global_batch=32, micro_batch=8)
        assert brightest in order.shards(number - 1)[shard]
        assert str(order.shards(number - 1)[shard].tolist()) in message
    saved = [int(folder.name[5:]) for folder in (tmp_path / "a" / "checkpoints").glob("step-*")]
    assert max(saved, default=0) == number - 1
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "failed"


def test_steps_with_a_loss_that_is_not_finite_can_be_skipped(ranks, tmp_path):
    model, _ = exploding(tmp_path)
    for precision in ("fp32", "fp16"):
        found = set()
        for world in (1, 2):
            train = {"non_finite": "skip", "precision": precision}
            config = config_in(tmp_path, f"{precision}{world}", model=model, train=train)
            summary = ranks(world, run_on_rank, config)[0]
            assert summary["status"] == "finished"
            assert summary["skipped_steps"] == 2
            found.add(summary["digest"])
        assert len(found) == 1


NAN_GRADIENT = """
import torch
from torch import nn

class Root(nn.Module):
    \"\"\"The root of nothing: a finite loss, a gradient that is not.\"\"\"
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 10)
    def forward(self, batch):
        x = self.head(self.norm(batch["image"].flatten(1) / 255))
        return x + torch.sqrt(x[:1, :1] * 0) if batch["label"][0] < 2 else x

def build(options, spec):
    return Root()
"""


def test_a_gradient_that_is_not_finite_is_noticed_too(ranks, tmp_path):
    file = tmp_path / "root.py"
    file.write_text(NAN_GRADIENT)
    model = {"kind": "user", "file": str(file)}
    for message in ranks(2, run_on_rank, config_in(tmp_path, "stop", model=model)):
        assert "the gradient became NaN or infinite in step" in message
    found = set()
    for world in (1, 2):
        summary = ranks(
            world, run_on_rank, config_in(tmp_path, f"skip{world}", model=model, train={"non_finite": "skip"})
        )[0]
        assert summary["status"] == "finished"
        assert summary["skipped_steps"] > 0
        assert summary["evaluation"]["loss"] == summary["evaluation"]["loss"]
        found.add(summary["digest"])
    assert len(found) == 1


def test_an_observer_that_fails_is_left_out_and_the_run_goes_on(ranks, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Bad:\n    def notice(self, event):\n        1 / 0\n    def close(self):\n        pass\n"
        "def observers(options):\n    return [Bad()]\n"
    )
    observe = {"file": str(file), "sinks": ["progress", "jsonl"]}
    summary = ranks(2, run_on_rank, config_in(tmp_path, "a", observe=observe))[0]
    assert summary["status"] == "finished"
    log = (tmp_path / "a" / "logs" / "rank-0.log").read_text()
    assert log.count("ZeroDivisionError") == 1
    assert "mine.py:3" in log


def test_an_early_stopped_run_is_not_trained_on(ranks, tmp_path):
    train = {"epochs": 40, "stop_metric": "accuracy", "stop_patience": 2}
    config = config_in(tmp_path, "a", train=train, optim={"lr": 0.02})
    first = ranks(2, run_on_rank, config)[0]
    again = ranks(1, run_on_rank, config)[0]
    same = ("status", "steps", "digest", "evaluation")
    assert [again[key] for key in same] == [first[key] for key in same]


def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(ranks, tmp_path):
    config = config_in(tmp_path, "a", checkpoint={"every_steps": 4, "keep": 2})
    whole = ranks(2, run_on_rank, config)[0]
    folder = tmp_path / "a" / "checkpoints"
    assert sorted(f.name for f in folder.iterdir()) == ["step-000000012", "step-000000014"]
    before = sorted(folder.iterdir())
    drifted = config_in(tmp_path, "a", checkpoint={"every_steps": 4, "keep": 2}, optim={"lr": 0.5})
    for message in ranks(2, run_on_rank, drifted, str(folder / "step-000000012")):
        assert "optim.lr" in message
    assert sorted(folder.iterdir()) == before  # a start that is refused changes nothing
    again = ranks(2, run_on_rank, config, str(folder / "step-000000012"))[0]
    assert again["digest"] == whole["digest"]
    aside = [f.name for f in folder.iterdir() if f.name.startswith("set-aside-")]
    assert len(aside) == 1
    assert aside[0].endswith("step-000000014")


def test_saves_by_the_clock_happen_once_each(ranks, tmp_path):
    config = config_in(
        tmp_path, "a", train={"epochs": 30}, checkpoint={"every_steps": None, "every_minutes": 0.004, "keep": 100}
    )
    ranks(2, run_on_rank, config)
    saved = sorted(int(f.name[5:]) for f in (tmp_path / "a" / "checkpoints").iterdir())
    assert len(saved) > 2
    assert all(b - a > 1 for a, b in zip(saved[:-2], saved[1:-1], strict=True)), saved


def test_a_folder_is_trained_by_one_run_at_a_time(ranks, tmp_path):
    (tmp_path / "a").mkdir()
    with FileLock(tmp_path / "a" / ".lock"):
        for message in ranks(2, run_on_rank, config_in(tmp_path, "a")):
            assert "is being trained by another process" in message
    assert ranks(2, run_on_rank, config_in(tmp_path, "a"))[0]["status"] == "finished"


def test_a_last_save_that_fails_is_no_success(ranks, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoints").symlink_to("/proc")  # a folder in which not even root can make another
    for message in ranks(2, run_on_rank, config_in(tmp_path, "a", checkpoint={"every_steps": None})):
        assert message.startswith("CheckpointError: the last checkpoint, of step 14, could not be saved in ")
    log = tmp_path / "a" / "metrics.jsonl"
    assert len(log.read_text().splitlines()) == 16  # the whole run was trained all the same


def test_a_metric_that_nobody_measures_is_told_before_training(ranks, tmp_path):
    model, _ = exploding(tmp_path)
    for message in ranks(2, run_on_rank, config_in(tmp_path, "a", model=model, checkpoint={"best": "acuracy"})):
        assert "did you mean 'accuracy'" in message
        assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_early_stopping_is_one_decision(ranks, tmp_path):
    train = {"epochs": 40, "stop_metric": "accuracy", "stop_patience": 2}
    found = [ranks(w, run_on_rank, config_in(tmp_path, f"w{w}", train=train, optim={"lr": 0.02}))[0] for w in (1, 2)]
    assert found[0]["status"] == found[1]["status"] == "stopped early"
    assert found[0]["steps"] == found[1]["steps"] < 280
    assert found[0]["digest"] == found[1]["digest"]


def test_the_best_checkpoint_stays(ranks, tmp_path):
    config = config_in(tmp_path, "a", train={"epochs": 6}, checkpoint={"best": "accuracy", "keep": 1, "every_steps": 3})
    ranks(2, run_on_rank, config)
    evaluations = [line for line in lines(tmp_path, "a") if line["kind"] == "evaluation"]
    best = max(evaluations, key=lambda line: (line["accuracy"], -line["step"]))
    names = sorted(folder.name for folder in (tmp_path / "a" / "checkpoints").iterdir())
    assert names == sorted({f"step-{best['step']:09}", "step-000000042"})


def test_evaluation_counts_every_sample_once(ranks, tmp_path):
    """1,003 samples, micro-batches of 16, 4 processes: the numbers are scikit-learn's."""
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss

    results = {world: ranks(world, evaluate_on_rank, str(tmp_path))[0] for world in (1, 4)}
    assert results[1] == results[4]
    samples, values, confusion, labels, probabilities = results[4]
    predicted = [max(range(10), key=row.__getitem__) for row in probabilities]
    assert samples == 1003
    assert values["accuracy"] == pytest.approx(accuracy_score(labels, predicted), abs=1e-7)
    assert values["f1"] == pytest.approx(f1_score(labels, predicted, average="macro"), abs=1e-6)
    assert values["loss"] == pytest.approx(log_loss(labels, probabilities, labels=range(10)), rel=1e-5)
    assert confusion == confusion_matrix(labels, predicted, labels=range(10)).tolist()


def evaluate_on_rank(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    recipe = Recipe.model_validate({"run": {"dir": folder, "name": f"e{size}"}})
    parts = build.assemble(recipe, World(rank=rank, size=size), torch.device("cpu"))
    parts.data = replace(parts.data, test=Subset(parts.data.train, torch.arange(1003).numpy()))
    parts.model.eval()
    result = parts.evaluate()
    columns = parts.data.test.__getitems__(range(1003))
    with torch.no_grad():
        logits = parts.model({"image": torch.as_tensor(columns["image"])})
    return (
        result.samples,
        result.values,
        result.confusion,
        columns["label"].tolist(),
        logits.double().softmax(1).tolist(),
    )
