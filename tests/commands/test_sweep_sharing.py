"""Trials of a sweep that differ only in what acts after a step run the steps before it once, and give the same bits."""

import json

import pytest
from running import lockstep, summary

from lockstep.checkpoint import layout
from lockstep.recipe import recipe as recipes
from lockstep.tools.sweep.shared_steps import forked

CONFIG = """
data: {kind: digits, limit: 200}
train: {steps: 12, global_batch: 32, micro_batch: 8}
schedule: {shape: wsd, decay: 4, warmup: 2}
launch: {processes: 1}
observe: {log_every: 1, sinks: [jsonl]}
checkpoint: {every_steps: 4, keep: 9, every_minutes: null}
evaluate: {every_epochs: null}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def swept(folder, *words):
    """Summaries of the trials, and the numbers of the steps that each has run."""
    done = lockstep(folder, "sweep", "c.yaml", "--metric", "accuracy", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((folder / "runs" / "c-sweep").glob("trial-*"))
    lines = [map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) for run in runs]
    steps = [[line["step"] for line in each if line["kind"] == "step"] for each in lines]
    return [json.loads((run / "summary.json").read_text()) for run in runs], steps, done.stdout


def shared(folder, *settings, of=()):
    """The step of the third trial at which another one would begin; None where it shares nothing."""
    place = ["evaluate.every_steps=5", f"run.dir={folder}/runs/c-sweep"]
    third = recipes.load(folder / "c.yaml", ["train.steps=20", *place, "run.name=trial-003", *of])
    recipe = recipes.load(folder / "c.yaml", ["train.steps=30", *place, "run.name=new", *of, *settings])
    parent = forked(recipe, [third]).run.parent
    return parent and layout.step_of(parent)


def test_steps_that_two_trials_have_in_common_are_run_once(folder):
    found, steps, printed = swept(folder, "train.steps=12,20", "evaluate.every_steps=5,6")
    assert [len(each) for each in steps] == [12, 4, 12, 4]  # of 12, 12, 20, 20
    assert "trial-002 goes on after step 8 of trial-001" in printed
    assert "trial-004 goes on after step 16 of trial-003" in printed
    for name, steps in (("short", 12), ("long", 20)):
        done = lockstep(folder, "train", "c.yaml", f"run.name={name}", f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    plain = [summary(folder, name) for name in ("short", "short", "long", "long")]
    for key in ("digest", "chain", "evaluation", "steps"):
        assert [each[key] for each in found] == [each[key] for each in plain], key
    assert plain[0]["digest"] != plain[2]["digest"]

    assert shared(folder) == 16
    assert shared(folder, "schedule.decay=18") == 12
    assert shared(folder, "schedule.shape=cosine") is None  # it differs from the third step on
    assert shared(folder, "optim.weight_decay=0.2") is None
    assert shared(folder, "data.limit=100") is None
    assert shared(folder, "train.stop_metric=accuracy") is None  # nobody has counted
    assert shared(folder, of=["checkpoint.best=loss"]) is None


def test_early_stopping_goes_on_counting(folder):
    words = ["train.stop_metric=accuracy", "train.stop_patience=3,1,5", "train.steps=30", "optim.lr=1e-9"]
    found, steps, _ = swept(folder, *words, "evaluate.every_steps=2", "checkpoint.every_steps=2")
    assert [each["status"] for each in found] == ["stopped early"] * 3
    assert [each["steps"] for each in found] == [8, 4, 12]
    assert steps == [list(range(1, 9)), list(range(1, 5)), list(range(9, 13))]  # the second would have ended before
    place = ["run.name=plain", "evaluate.every_steps=2", "train.stop_patience=5"]
    done = lockstep(folder, "train", "c.yaml", words[0], *words[2:], *place)
    assert done.returncode == 0 and summary(folder, "plain")["digest"] == found[2]["digest"], done.stderr
