"""Spikes in real runs: the step is named with the command that replays it, wherever a run is read."""

import io
import json

import pytest
from rich.console import Console
from running import lockstep, summary
from training_runs import config_in, run_on_rank

from lockstep.base.events import Spiked
from lockstep.observe.report import run_files
from lockstep.observe.watch.run_state import RunReader
from lockstep.observe.watch.screen import screen

CONFIG = "data: {kind: digits}\nmodel: {kind: cnn}\nobserve: {log_every: 7}\n"
SETTINGS = ["train.steps=70", "train.epochs=null", "evaluate.every_epochs=null", "launch.processes=1"]
JUMPS = "def schedule(step):\n    return 300.0 if step == 49 else 1.0\n"


@pytest.fixture(scope="module")
def jumped(tmp_path_factory):
    """A run whose schedule has a wrong number in it: step 50 goes much too far, and the loss of step 51 shows it."""
    folder = tmp_path_factory.mktemp("spikes")
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "jumps.py").write_text(JUMPS)
    done = lockstep(folder, "train", "c.yaml", "run.name=a", *SETTINGS, "schedule.shape=user", "schedule.file=jumps.py")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.core
def test_a_spike_is_named_wherever_a_run_is_read(jumped):
    folder, output = jumped
    run = folder / "runs" / "a"
    (found,) = summary(folder, "a")["spikes"]
    assert found["step"] == 51 and found["loss"] > 5 * found["loss_before"]
    text = f"the loss jumped to {found['loss']:.4g} ({found['loss_before']:.4g} before)"
    command = "; `lockstep replay runs/a --step 51` shows its samples"
    (told,) = [line for line in output.splitlines() if line.startswith("step 51: ")]
    assert text in told and told.endswith(command)
    assert told in (run / "logs" / "rank-0.log").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["kind"] == "spike"] == [{"kind": "spike", **found}]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(7, 71, 7))  # as always


def test_reports_and_the_screen_show_it(jumped):
    run = jumped[0] / "runs" / "a"
    read = run_files.read(run)
    assert not read.notes and 51 not in read.curves["loss"].steps and "loss_before" not in read.curves
    page = (run / "report.html").read_text()
    marks = json.loads(page.partition('"marks": ')[2].partition(', "charts"')[0])
    assert [mark["step"] for mark in marks if "jumped to" in mark["text"]] == [51]
    assert "lockstep replay runs/a --step 51" in page
    shown = io.StringIO()
    Console(file=shown, width=160, color_system=None).print(screen(RunReader(run).state(), width=160))
    assert "step 51: the loss jumped to" in shown.getvalue()


class Unlucky:
    """One micro-batch of a step has images that are forty times as bright, and wrong labels."""

    def __init__(self, at):
        self.at, self.events = at, []

    def starting(self, task, training):
        task.bus.subscribe(self)
        inner = training.steps

        def steps(start):
            for micro_batches in inner(start):
                for each in micro_batches:
                    if (each.step, each.shard) == (self.at - 1, 0):
                        each.batch["image"] = each.batch["image"].float() * 40
                        each.batch["label"] = (each.batch["label"] + 1) % 10
                yield micro_batches

        training.steps = steps

    def notice(self, event):
        if isinstance(event, Spiked):
            self.events.append(event.step)

    def close(self):
        pass


def trained_with_a_broken_sample(config, stop_after=None):
    hooks = Unlucky(50)
    return run_on_rank(config, stop_after=stop_after, hooks=hooks), hooks.events


def config_of(folder, name, log_every):
    train = {"steps": 70, "epochs": None, "micro_batch": 8}
    observe, save = {"log_every": log_every, "sinks": ["jsonl"]}, {"every_steps": 20}
    data = {"limit": None}
    return config_in(folder, name, train=train, observe=observe, checkpoint=save, data=data)


def test_kills_the_number_of_processes_and_log_every_change_no_mark(ranks, tmp_path):
    (whole, events), *_ = ranks(1, trained_with_a_broken_sample, config_of(tmp_path, "whole", 1))
    assert [found["step"] for found in whole["spikes"]] == [50] == events
    config = config_of(tmp_path, "parts", 9)
    for stop_after in (45, 55):
        ranks(2, trained_with_a_broken_sample, config, stop_after)
    (ended, _), *_ = ranks(2, trained_with_a_broken_sample, config)
    assert ended["spikes"] == whole["spikes"] and ended["digest"] == whole["digest"]
    lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "spike"] == [50]
