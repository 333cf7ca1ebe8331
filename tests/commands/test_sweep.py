"""`lockstep sweep` on real runs: killed and resumed, pruned, failing, interrupted; what it suggests, and what it refuses."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from holding import HOLDING
from running import lockstep, started, summary, wait_for_steps
from typer.testing import CliRunner

from lockstep.base.errors import ConfigError
from lockstep.cli import _app
from lockstep.recipe import recipe_trust
from lockstep.tools.sweep import optuna_search, search_space, sweep_plan, sweep_state, trial_training
from lockstep.tools.sweep.search_space import parse
from lockstep.tools.sweep.sweep_state import Measured, Sweep, SweepTrial
from lockstep.tools.sweep.sweep_table import svg

CONFIG = """
data: {kind: digits, limit: 200}
train: {epochs: 2, global_batch: 32, micro_batch: 8}
launch: {processes: 1}
observe: {log_every: 1, sinks: [jsonl], file: holding.py}
checkpoint: {every_steps: 5}
"""
FAILING = """
from torch import nn


class Net(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fails, self.head = fails, nn.Linear(64, 10)

    def forward(self, batch):
        if self.fails:
            raise RuntimeError("these settings are no good")
        return self.head(batch["image"].flatten(1) / 255)


def build(options, spec):
    return Net(options["fails"])
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "holding.py").write_text(HOLDING)
    return tmp_path


def state(folder, name="c-sweep"):
    return Sweep.model_validate_json((folder / "runs" / name / "sweep.json").read_text())


def starts(run):
    return [
        json.loads(line)["step"] for line in (run / "history.jsonl").read_text().splitlines() if '"started"' in line
    ]


def held(folder, name, *words):
    """A sweep that is held in step 12 of a trial."""
    (folder / "hold").write_text(name)
    process = started(folder, "sweep", "c.yaml", *words)
    wait_for_steps(folder / "runs/c-sweep" / name, 12)
    return process


def test_six_trials_are_killed_and_resumed(folder):
    words = ["optim.lr=1e-2,1e-3,1e-5", "train.global_batch=16,32", "--metric", "accuracy"]
    runs = [folder / f"runs/c-sweep/trial-{number:03}" for number in range(1, 7)]
    sweep = held(folder, "trial-003", *words)
    sweep.kill()
    sweep.wait(10)
    sweep.stdout.close()
    (folder / "hold").unlink()
    assert [trial.state for trial in state(folder).trials] == ["finished", "finished", "running"]
    done = lockstep(folder / "runs", "sweep", "c-sweep")  # relative paths still count from where it began
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of them ended before" in done.stdout and "trial-002 of 6" not in done.stdout

    found = state(folder)
    assert [list(trial.settings.values()) for trial in found.trials] == [
        [lr, batch] for lr in (1e-2, 1e-3, 1e-5) for batch in (16, 32)
    ]
    assert [len(starts(run)) for run in runs] == [1, 1, 2, 1, 1, 1] and starts(runs[2])[1] >= 5
    measured = {run.name: json.loads((run / "summary.json").read_text()) for run in runs}
    assert {trial.name: trial.value for trial in found.trials} == {
        name: each["evaluation"]["accuracy"] for name, each in measured.items()
    }
    assert found.best == max(measured, key=lambda name: measured[name]["evaluation"]["accuracy"])
    best = next(trial for trial in found.trials if trial.name == found.best)
    lines = done.stdout.partition("Lines for the config:")[2].partition("The picture")[0]
    assert yaml.safe_load(lines) == {
        "optim": {"lr": best.settings["optim.lr"]},
        "train": {"global_batch": best.settings["train.global_batch"]},
    }

    plain = lockstep(folder, "train", "c.yaml", "run.name=plain", "optim.lr=1e-3", "train.global_batch=16")
    assert plain.returncode == 0 and summary(folder, "plain")["digest"] == found.trials[2].digest

    again = lockstep(folder, "sweep", "c.yaml", *words)
    assert again.returncode == 0 and "6 of them ended before" in again.stdout and found.best in again.stdout
    assert state(folder) == found and [len(starts(run)) for run in runs] == [1, 1, 2, 1, 1, 1]
    other = lockstep(folder, "sweep", "c.yaml", *words, "train.epochs=5")
    assert other.returncode == 2 and "is another sweep (its config has changed)" in other.stderr
    other = lockstep(folder, "sweep", "c.yaml", *words[1:], "optim.lr=1,2")
    assert other.returncode == 2 and "is another sweep (" in other.stderr


def test_ctrl_c_saves_and_says_how_to_go_on(folder):
    sweep = held(folder, "trial-001", "optim.lr=1e-2,1e-3", "--search", "random", "--trials", "9")
    os.killpg(sweep.pid, signal.SIGINT)
    time.sleep(0.3)
    (folder / "hold").unlink()
    output = sweep.communicate(timeout=60)[0]
    assert sweep.returncode == 75 and f"go on with: lockstep sweep {folder}/runs/c-sweep" in output, output
    done = lockstep(folder, "sweep", "runs/c-sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = starts(folder / "runs/c-sweep/trial-001")
    assert first == 0 and second >= 12  # saved by the interrupted run, not at a checkpoint that was due
    assert "no other settings to try than those of 2 trials" in " ".join(done.stdout.split())


def test_clearly_worse_trials_are_pruned(folder):
    words = ["optim.lr=0.03,0.02,0.01,1e-6", "--prune", "median", "train.epochs=8"]
    (folder / "slow").write_text("trial-004")
    done = lockstep(folder, "sweep", "c.yaml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = state(folder)
    assert [trial.state for trial in found.trials] == ["finished", "finished", "finished", "pruned"]
    last = found.trials[-1]
    assert [each.step for each in last.evaluations] == [7] and last.value == last.evaluations[0].value == last.loss
    ended = json.loads((folder / "runs/c-sweep/trial-004/summary.json").read_text())
    assert ended["status"] == "interrupted" and ended["steps"] < 56
    assert "pruned: at step 7 of 56" in done.stdout
    assert "best" in {text for text in shown(folder / "runs/c-sweep/sweep.svg")}


def shown(picture):
    return [text.strip() for text in ElementTree.fromstring(picture.read_text()).itertext() if text.strip()]


@pytest.mark.core
def test_failed_trials_are_noted_and_the_sweep_goes_on(folder):
    (folder / "net.py").write_text(FAILING)
    words = ["model.kind=user", "model.file=net.py", "train.epochs=1", "--name", "nets"]
    done = lockstep(folder, "sweep", "c.yaml", "model.options.fails=true,false", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    failed, finished = state(folder, "nets").trials
    assert failed.state == "failed" and failed.note == "RuntimeError: these settings are no good"
    assert state(folder, "nets").best == finished.name == "trial-002"
    words = ["model.options.fails=true", "optim.lr=0.1,0.2", *words[:-1], "none"]
    done = lockstep(folder, "sweep", "c.yaml", *words)
    assert done.returncode == 1 and "No trial has finished" in done.stdout


def test_optuna_searches_with_what_it_has_seen(folder):
    words = ["optim.lr=1e-4..1e-1", "train.global_batch=16,32", "--search", "optuna", "train.epochs=1"]
    done = lockstep(folder, "sweep", "c.yaml", *words, "--trials", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    before = state(folder)
    expected = optuna_search.suggestion(before, seed=0)
    assert lockstep(folder, "sweep", "c.yaml", *words, "--trials", "3").returncode == 0
    after = state(folder)
    assert after.trials[:2] == before.trials and after.trials[2].settings == expected
    assert json.loads((folder / "runs/c-sweep/trial-003/summary.json").read_text())["status"] == "finished"


# ---- suggestions


def swept(*words):
    return parse(words)[0]


def sweep_of(*words, metric="loss", values=()):
    """A sweep whose trials have one evaluation in the middle, with these values."""
    keys = swept(*words)
    trials = [
        SweepTrial(
            number=number,
            settings=settings,
            state="finished",
            value=value,
            evaluations=[Measured(step=1, value=value, loss=value), Measured(step=2, value=value, loss=value)],
        )
        for number, (value, settings) in enumerate(
            zip(values, search_space.drawn(keys, seed=0, count=len(values)), strict=True), 1
        )
    ]
    return Sweep(keys=keys, search="random", count=20, metric=metric, prune="median", working_folder="/", trials=trials)


def test_words_are_lists_ranges_or_settings_of_all():
    keys, shared = parse(
        ["a.b=1,2.5", "a.c=[1, 2],[3]", "a.d=x,'y, z'", "a.e=1e-5..1e-2", "a.f=16..64", "a.g=2..5.0"]
        + ["b.a=[1, 2]", "b.b='x,y'", "b.c=", "b.d=1,1"]
    )
    assert [(key.values, key.ends, key.is_log, key.is_integer) for key in keys] == [
        ((1, 2.5), None, False, False),
        (([1, 2], [3]), None, False, False),
        (("x", "y, z"), None, False, False),
        ((), (1e-5, 1e-2), True, False),
        ((), (16, 64), False, True),
        ((), (2, 5.0), False, False),
    ]
    assert shared == ["b.a=[1, 2]", "b.b='x,y'", "b.c=", "b.d=1,1"]


def test_a_grid_has_every_combination_in_order():
    settings = search_space.grid(swept("a.b=1,2", "a.c=x,y,z"))
    assert [tuple(each.values()) for each in settings] == [(b, c) for b in (1, 2) for c in "xyz"]


def test_random_settings_follow_from_the_seed():
    keys = swept("a.b=1e-5..1e-2", "a.c=16..64", "a.d=x,y")
    drawn = search_space.drawn(keys, seed=7, count=40)
    assert drawn[:20] == search_space.drawn(keys, seed=7, count=20) != search_space.drawn(keys, seed=8, count=20)
    assert all(1e-5 <= each["a.b"] <= 1e-2 and each["a.c"] in range(16, 65) for each in drawn)
    assert 10 < sum(each["a.b"] < 10**-3.5 for each in drawn) < 30  # by the logarithm
    assert sorted(each["a.b"] for each in search_space.drawn(swept("a.b=1,2,3"), seed=0, count=9)) == [1, 2, 3]


def test_optuna_is_a_pure_function_of_the_trials():
    words = ["a.b=1e-5..1e-2", "a.c=16..64", "a.d=[1],[2]"]
    sweep = sweep_of(*words, values=[3.0, 2.0, 1.0] * 4)
    again = Sweep.model_validate_json(sweep.model_dump_json())
    settings = optuna_search.suggestion(sweep, seed=1)
    assert settings == optuna_search.suggestion(again, seed=1) != optuna_search.suggestion(again, seed=2)
    assert settings["a.d"] in ([1], [2]) and isinstance(settings["a.c"], int) and 1e-5 <= settings["a.b"] <= 1e-2
    sweep.metric = "accuracy"
    assert optuna_search.suggestion(sweep, seed=1) != settings  # more is better
    assert optuna_search.suggestion(sweep_of("a.b=1,2", values=[1.0, 2.0]), seed=0) is None  # nothing else to try


@pytest.mark.parametrize("judge", [trial_training.clearly_worse, optuna_search.clearly_worse])
@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("loss", [2.0, 2.5], None),
        ("loss", [3.5, 2.5], 0),
        ("loss", [None], 0),
        ("accuracy", [3.0, 3.5], None),
        ("accuracy", [2.0, 4.0], 0),
    ],
)
def test_both_pruners_end_what_is_worse_than_the_median(judge, metric, values, expected):
    sweep = sweep_of("a.b=1..99", metric=metric, values=[1.0, 2.0, 3.0, 4.0, 5.0])
    measured = [Measured(step=step, value=value, loss=None) for step, value in enumerate(values, 1)]
    assert judge(sweep, measured) == expected
    sweep.trials = sweep.trials[:2]
    assert judge(sweep, measured) is None or (judge is optuna_search.clearly_worse and values == [None])


def test_a_picture_has_a_panel_for_each_key():
    sweep = sweep_of("a.b=1e-5..1e-2", "a.c=x,y", "a.d=1,2,3", "a.e=1,1000", values=[1.0, 2.0, 0.5])
    sweep.best = "trial-003"
    texts = [text.strip() for text in ElementTree.fromstring(svg(sweep, "a <title>")).itertext() if text.strip()]
    assert {"a.b, log scale", "a.c", "a.d", "a.e, log scale", "x", "y", "best", "finished", "a <title>"} <= set(texts)
    assert not [text for text in texts if "$" in text]


# ---- what is refused


@pytest.mark.parametrize("values", [(5e-324, 1e-323), (-9e99, 9e99), (9e99, 8e99), (1.0, 1.0), (None, None)])
def test_any_values_can_be_drawn(values):
    for word in ("optim.lr=1e-5..1e-2", "optim.lr=1,2"):
        sweep = sweep_of(word, values=values)
        assert "<svg" in svg(sweep, "title")


def test_a_sweep_with_other_values_than_its_keys_is_refused(folder):
    for key, value, measured in ((1, "x", 0), ([1], {}, 0), (10**400, 10**400, 0), ("a", None, 0), (1, 1, 1.7e308)):
        trial = {"number": 1, "settings": {"a.b": value} if value is not None else {}, "value": measured}
        body = {"keys": [{"key": "a.b", "values": [key]}], "search": "grid", "count": 1, "metric": "loss"}
        body |= {"prune": "none", "working_folder": "/", "trials": [trial]}
        (folder / "sweep.json").write_text(json.dumps(body))
        with pytest.raises(ConfigError, match=r"sweep.json cannot be used \("):
            sweep_state.load(folder)


@pytest.fixture
def refused(folder, monkeypatch):
    """Call the command in this process -> its message; it has begun nothing."""
    monkeypatch.chdir(folder)

    def call(*words):
        result = CliRunner().invoke(_app.app, ["sweep", *words])
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        assert not (folder / "runs").exists()
        return " ".join(result.output.split())

    return call


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to vary: a setting with several values"),
        (["optim.lr=0.1"], "say what to vary"),
        (["optim.lrr=0.1,0.2"], "optim.lrr: unknown key — did you mean 'lr'?"),
        (["optim.lr=0.1,fast"], "with optim.lr=fast: command line: optim.lr: should be a valid number"),
        (["train.global_batch=4,32"], "with train.global_batch=4: c.yaml:3: train.micro_batch: 8 is more than"),
        (["train.global_batch=4..64", "--search", "optuna"], "with train.global_batch=4: c.yaml:3"),
        (["optim.lr=0.1,0.2", "optim.lr=0.3"], "optim.lr is given twice"),
        (["optim.lr=1e-5..1e-2"], "a grid tries listed values; list some, or add --search random"),
        (["optim.lr=1..0.1", "--search", "random"], "from the smaller number to the larger one"),
        (["run.name=a,b"], "run.name changes nothing about what is learned"),
        (["launch.processes=1,2"], "launch.processes changes nothing about what is learned"),
        (["optim.lr=0.1,0.2", "--metric", "acuracy"], "there is no 'acuracy' — did you mean 'accuracy'?"),
        (["optim.lr=0.1,0.2", "--metric", "f1", "evaluate.metrics=[accuracy]"], "'f1' is not among evaluate.metrics"),
        (["optim.lr=0.1,0.2", "--trials", "3"], "--trials belongs to --search random or optuna"),
        (["optim.lr=0.1,0.2", "--name", "a/b"], "a run's name is one folder"),
        (["optim.lr=0.1,0.2", "--jobs", "2"], "--jobs is for launch.kind=slurm, ray or kubernetes"),
        (["optim.lr=0.1,0.2", "launch.nodes=2"], "with launch.kind=local a sweep runs on this machine; set launch.nodes=1"),
        (["optim.lr=0.1,0.2", "--prune", "median", "observe.sinks=[]"], "add jsonl, or give --prune none"),
        ([f"optim.lr={','.join(map(str, range(1, 40)))}", f"run.seed={','.join(map(str, range(40)))}"], "of 1,560 trials"),
    ],
)  # fmt: skip
def test_what_cannot_be_swept_is_refused_before_any_trial(refused, words, message):
    assert message in refused("c.yaml", *words)


def test_a_folder_that_is_no_sweep(refused, folder):
    (folder / "other").mkdir()
    assert "other is no sweep: there is no sweep.json in it" in refused("other")


def test_optuna_is_an_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'lockstep-train[sweep]'" in refused("c.yaml", "optim.lr=0.1,0.2", "--search", "optuna")


def test_a_sweep_of_somebody_else_executes_nothing(folder, monkeypatch):
    strange = folder / "strange"
    strange.mkdir()
    (strange / "sweep.yaml").write_text(CONFIG.replace("holding.py", str(folder / "unknown.py")))
    (folder / "unknown.py").write_text("open('canary', 'w')\n")
    (strange / "sweep.json").write_text(sweep_of("optim.lr=0.1,0.2").model_dump_json())
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(_app.app, ["sweep", "strange"])
    assert result.exit_code == 2 and "add --trust-code" in result.output
    (strange / "sweep.json").write_text('{"keys": []}')
    result = CliRunner().invoke(_app.app, ["sweep", "strange"])
    assert result.exit_code == 2 and "sweep.json cannot be used (keys: List should have" in result.output
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("has_state", [False, True])
def test_a_config_that_lay_in_the_sweeps_folder_is_not_the_users(folder, monkeypatch, has_state):
    """It is replaced by a copy of his before anything reads it."""
    place = folder / "runs/c-sweep"
    place.mkdir(parents=True)
    planted = CONFIG.replace("processes: 1", "processes: 1, environment: {PLANTED: '1'}")
    (place / "sweep.yaml").write_text(planted if has_state else planted.replace("holding.py", "planted.py"))
    monkeypatch.chdir(folder)
    if has_state:
        stored = sweep_of("optim.lr=0.1,0.2").model_copy(update={"search": "grid", "prune": "none"})
        (place / "sweep.json").write_text(stored.model_dump_json())
    read = []
    monkeypatch.setattr(recipe_trust, "authorize", lambda recipe, *_, **__: read.append(recipe) or ())
    plan = sweep_plan.planned(Path("c.yaml"), ["optim.lr=0.1,0.2"], sweep_plan.SweepOptions())
    assert read and not any("PLANTED" in str(recipe) or "planted.py" in str(recipe) for recipe in read)
    assert (place / "sweep.yaml").read_text() == CONFIG and plan.base.launch.environment == {}
