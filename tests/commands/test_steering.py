"""Observers that steer: on any number of processes and through kills the same decisions at the same steps."""

import json
import math
import shutil

import pytest
from members import further
from running import lockstep, started, summary, wait_for_steps, workers

import lockstep as api
from lockstep.base.events import Bus, Steered, Warned
from lockstep.training.steering import Decision, Steering

OBSERVER = """
import json
import os
import signal
import time
from pathlib import Path

import lockstep
from lockstep.base.events import Evaluated, StepDone

ASKS = {10: lockstep.ScaleLearningRate(0.5), 25: [lockstep.ScaleLearningRate(0.5), lockstep.Save()]}


class Steers:
    def __init__(self, options):
        self.options, self.steps = options, 0

    def notice(self, event):
        if isinstance(event, StepDone):
            self.steps += 1
            if event.step == self.options.get("interrupts") and not Path("interrupted").exists():
                Path("interrupted").touch()
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(self.options.get("seconds", 0))
            return None if Path("asked").exists() else {**ASKS, **self.more()}.get(event.step)
        if isinstance(event, Evaluated):
            with open("evaluated", "a") as file:
                file.write(f"{event.step}\\n")

    def more(self):
        if "stop" in self.options:
            return {self.options["stop"]: lockstep.Stop(), 30: lockstep.Evaluate()}
        return {}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        Path("restored").write_text(json.dumps(state))

    def close(self):
        Path("closed").write_text(str(self.steps))


class Fails:
    def notice(self, event):
        if isinstance(event, StepDone) and event.step == 3:
            KIND

    def close(self):
        pass


def observers(options):
    return [Fails(), Steers(options)]
"""
SETTINGS = ["run.name=a", "train.steps=60", "train.global_batch=32", "train.micro_batch=8", "data.limit=400"]
SETTINGS += ["observe.log_every=1", "observe.file=observer.py", "checkpoint.every_steps=20"]


def prepare(folder, kind="pass"):
    (folder / "observer.py").write_text(OBSERVER.replace("KIND", kind))
    (folder / "c.yaml").write_text("data: {kind: digits}\n")


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path)
    return tmp_path


def train(folder, *settings):
    done = lockstep(folder, "train", "c.yaml", *SETTINGS, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder, "a")


def steps_of(folder):
    lines = [json.loads(line) for line in (folder / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "step"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The summary of a run on one process."""
    folder = tmp_path_factory.mktemp("steered")
    prepare(folder)
    found = train(folder, "launch.processes=1")
    rates = {step: line["learning_rate"] for step, line in steps_of(folder).items()}
    plain = 1e-3  # of the first step; without warm-up the schedule falls in a line to 0
    for step, factor in ((11, 1), (12, 0.5), (26, 0.5), (27, 0.25), (60, 0.25)):
        assert rates[step] == pytest.approx(plain * factor * (1 - (step - 1) / 60), rel=0.3)
    assert rates[12] < 0.6 * rates[11] and rates[27] < 0.6 * rates[26]
    assert (folder / "runs" / "a" / "checkpoints" / "step-000000026" / "manifest.json").exists()
    return found


@pytest.mark.parametrize(
    "settings", [["launch.processes=3", "parallel.kind=fsdp"], *further(["launch.processes=3"])], ids=str
)
def test_any_world_decides_the_same(folder, undisturbed, settings):
    found = train(folder, *settings)
    assert (found["digest"], found["chain"]) == (undisturbed["digest"], undisturbed["chain"])
    lines = (folder / "runs" / "a" / "steering.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 25]


def test_a_killed_run_repeats_what_was_decided(folder, undisturbed):
    """The observer asks for nothing after the resume, and gets back what it remembered."""
    process = started(folder, "train", "c.yaml", *SETTINGS, "observe.options.seconds=0.1", "launch.max_restarts=0")
    wait_for_steps(folder / "runs" / "a", 30)
    (folder / "asked").touch()
    workers(process)[0].kill()
    process.communicate(timeout=60)
    left = max(path.name for path in (folder / "runs" / "a" / "checkpoints").glob("step-*"))
    if left > "step-000000020":  # so that the resume goes back to before the decision
        for path in (folder / "runs" / "a" / "checkpoints").glob("step-0000000[2-9][1-9]"):
            path.rename(path.with_name(f"away-{path.name}"))
    found = train(folder, "--allow-drift")
    assert (found["digest"], found["chain"]) == (undisturbed["digest"], undisturbed["chain"])
    assert json.loads((folder / "restored").read_text()) == {"steps": 20}
    assert (folder / "closed").read_text() == "60"


@pytest.mark.parametrize("step", [24, *(pytest.param(step, marks=pytest.mark.matrix) for step in (23, 25))])
def test_an_interruption_loses_no_request(folder, undisturbed, step):
    """The run ends after the step before, that of the request, and the one in which it takes effect."""
    options = [f"observe.options.interrupts={step}"]
    done = lockstep(folder, "train", "c.yaml", *SETTINGS, *options)
    assert done.returncode == 75, done.stdout + done.stderr
    assert step < summary(folder, "a")["steps"] < 60  # soon after: on a busy machine the signal comes some steps late
    found = train(folder, *options)
    assert (found["digest"], found["chain"]) == (undisturbed["digest"], undisturbed["chain"])


def test_live_recovery_says_that_observers_begin_anew(folder):
    live = ["train.steps=3", "launch.processes=2", "launch.recovery=live"]
    done = lockstep(folder, "train", "c.yaml", *SETTINGS, *live)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("the observers of observe.file begin anew") == 1


def test_a_fresh_start_forgets(folder, undisturbed):
    train(folder)
    (folder / "asked").touch()
    shutil.rmtree(folder / "runs" / "a" / "checkpoints")
    found = train(folder)
    assert found["digest"] != undisturbed["digest"]
    assert (folder / "runs" / "a" / "steering.jsonl").read_text() == ""


def test_a_stop_ends_the_run_for_good(folder):
    found = train(folder, "observe.options.stop=40")
    assert (found["status"], found["steps"]) == ("stopped early", 41)
    evaluated = [int(line) for line in (folder / "evaluated").read_text().splitlines()]
    assert {31, 41} <= set(evaluated)
    again = train(folder, "observe.options.stop=40")
    assert (again["status"], again["steps"], again["digest"]) == ("stopped early", 41, found["digest"])


@pytest.mark.parametrize(
    "kind",
    [
        *("raise KeyboardInterrupt", "return 'stop'"),
        *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("raise SystemExit(3)", "1 / 0")),
    ],
)
def test_an_observer_that_fails_is_left_out(folder, undisturbed, kind):
    prepare(folder, kind)
    found = train(folder, "launch.processes=2")
    assert found["digest"] == undisturbed["digest"]
    log = (folder / "runs" / "a" / "logs" / "rank-0.log").read_text()
    assert log.count("Fails failed and is left out from here on: ") == 1
    assert "Traceback" not in log
    if kind == "return 'stop'":
        assert "notice() returned 'stop': it may return lockstep.Stop(), Save(), Evaluate(), " in log


def test_a_file_that_cannot_be_read_is_one_message(folder):
    train(folder)
    (folder / "runs" / "a" / "steering.jsonl").write_text('{"step": -1}\n')
    done = lockstep(folder, "train", "c.yaml", *SETTINGS)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "steering.jsonl, which says what observers asked of this run, cannot be read" in done.stderr
    assert "remove it to go on without" in done.stderr


@pytest.mark.parametrize("factor", [0, -1, math.inf, math.nan, "half"])
def test_factors_are_positive_numbers(factor):
    with pytest.raises(ValueError, match="should be a positive number"):
        api.ScaleLearningRate(factor)


@pytest.mark.parametrize("factor", [1.0, 0.1, 1e-300, 3.0, 1e300])
def test_factors_keep_all_bits(tmp_path, factor):
    class State:
        step, rate_factor, is_stopped = 7, 1.0, False

    steering, state = Steering(Bus(), tmp_path / "f"), State()
    steering.apply(Decision(step=7, factor=factor).flags(), state)
    assert state.rate_factor == factor


def test_requests_of_one_step_are_one_decision(tmp_path):
    bus = Bus()
    bus.requests = [("a", api.ScaleLearningRate(0.5)), ("b", api.Save()), ("a", api.ScaleLearningRate(4))]
    steering = Steering(bus, tmp_path / "steering.jsonl")
    assert steering.flags(3) == Decision(step=3, save=True, factor=2.0).flags()
    assert json.loads(steering.file.read_text()) == {"step": 3, "by": "a, b", "save": True, "factor": 2.0}
    again = Steering(Bus(), steering.file)
    again.start(2, repeats=True)
    again.bus.requests = [("a", api.Stop())]
    assert again.flags(2) == [0, 0, 0, 0]
    assert again.flags(3) == Decision(step=3, save=True, factor=2.0).flags()
    again.bus.requests = [("a", api.Stop())]
    assert again.flags(4) == [1, 0, 0, 0]


def test_what_cannot_be_written_down_is_not_done(tmp_path):
    events = []

    class Keeps:
        def notice(self, event):
            events.append(event)

        def close(self):
            pass

    bus = Bus()
    bus.subscribe(Keeps())
    bus.requests = [("a", api.Stop())]
    assert Steering(bus, tmp_path / "nowhere" / "steering.jsonl").flags(3) == [0, 0, 0, 0]
    assert [type(event) for event in events] == [Warned]
    assert not any(isinstance(event, Steered) for event in events)
