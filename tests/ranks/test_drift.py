"""A run that goes on with another numeric recipe: refused by name, or allowed and remembered."""

import json
from dataclasses import replace

import yaml
from training_runs import config_in, run_on_rank

from lockstep.checkpoint import layout


def test_another_numeric_recipe_is_named_and_refused(ranks, tmp_path):
    ranks(1, run_on_rank, config_in(tmp_path, "a"), "auto", 3)
    other = config_in(tmp_path, "a", optim={"lr": 0.5}, train={"micro_batch": 16})
    for message in ranks(2, run_on_rank, other):
        assert "optim.lr: 0.001 in the checkpoint, 0.5 now" in message
        assert "train.micro_batch: 8 in the checkpoint, 16 now" in message
        assert "--allow-drift" in message
    assert yaml.safe_load((tmp_path / "a" / "recipe.yaml").read_text())["optim"]["lr"] == 0.001
    assert ranks(2, run_on_rank, other, "auto", None, True)[0]["status"] == "finished"


def test_drift_is_remembered(ranks, tmp_path):
    """What was allowed to change is in every later summary, whoever goes on with the run."""

    def resumed(stop_after, allow_drift, **changes):
        ranks(1, run_on_rank, config_in(tmp_path, "a", **changes), "auto", stop_after, allow_drift)
        found = json.loads((tmp_path / "a" / "summary.json").read_text())
        return found["steps"], found["drift"]

    first, drift = resumed(3, False)
    assert drift == []
    second, drift = resumed(6, True, optim={"lr": 0.5, "momentum": 0.8})
    expected = [
        {"step": first, "field": "optim.lr", "before": 0.001, "now": 0.5},
        {"step": first, "field": "optim.momentum", "before": 0.9, "now": 0.8},
    ]
    assert drift == expected
    third, drift = resumed(9, False, optim={"lr": 0.5, "momentum": 0.8})
    assert drift == expected
    last, drift = resumed(None, True, optim={"lr": 0.5})
    expected.append({"step": third, "field": "optim.momentum", "before": 0.8, "now": 0.9})
    assert drift == expected
    assert first < second < third < last == 14
    assert resumed(None, True, optim={"lr": 0.1}) == (14, expected)  # nothing is left to be trained with it


def test_a_checkpoint_of_an_earlier_version_is_resumed(ranks, tmp_path):
    """It lacks settings that are newer: these may have their default, but nothing else."""
    ranks(1, run_on_rank, config_in(tmp_path, "a"), "auto", 3)
    (newest,) = [path for path in (tmp_path / "a" / "checkpoints").iterdir() if path.name.startswith("step-")]
    manifest = layout.read_manifest(newest)
    newer = {"optim.groups", "schedule.final", "train.label_smoothing", "data.transforms"}
    older = {name: value for name, value in manifest.numeric.items() if name not in newer}
    assert len(manifest.numeric) == len(older) + len(newer)
    (newest / layout.MANIFEST).write_text(replace(manifest, numeric=older).text())
    (message,) = ranks(1, run_on_rank, config_in(tmp_path, "a", schedule={"final": 0.5}))
    assert "schedule.final: None in the checkpoint, 0.5 now" in message and "optim.groups" not in message
    assert ranks(1, run_on_rank, config_in(tmp_path, "a"))[0]["status"] == "finished"
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["drift"] == []
