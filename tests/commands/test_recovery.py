"""launch.recovery=auto: where a run goes on without a lost process by default, and where it restarts."""

import json
import os
import subprocess
import sys

import pytest
import torch
from running import summary, wait_for_steps, workers

from lockstep.base.config import parse
from lockstep.base.errors import ConfigError
from lockstep.launch.recovery import may_recover_live, with_recovery
from lockstep.recipe.recipe import Recipe

TWO = "launch: {processes: 2}\n"
RESTARTS = {
    "one process": "launch: {processes: 1}",
    "several machines": "launch: {processes: 2, nodes: 2}",
    "no restarts": "launch: {processes: 2, max_restarts: 0}",
    "patience": "launch: {processes: 2, failure_timeout_seconds: 600}",
    "a smallest size": "launch: {processes: 2, min_processes: 2}",
    "asked for": "launch: {processes: 2, recovery: restart}",
    "a scheduler": "launch: {kind: slurm, processes: 2}",
    "without a launcher that could": "launch: {kind: spawn, processes: 2}",
    "parts of the state": TWO + "parallel: {kind: fsdp}",
    "own observers": TWO + "observe: {file: mine.py}",
    "statistics of all processes": TWO + "train: {batchnorm: sync}",
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="live recovery by default needs Linux")


def recipe(text):
    return parse(Recipe, f"data: {{kind: digits}}\n{text}", file="c.yaml")


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@linux
def test_several_processes_of_one_machine_recover_live(no_gpus):
    asked = recipe(TWO)
    decided = with_recovery(asked)
    assert may_recover_live(asked) and decided.launch.recovers_live
    assert (asked.launch.recovery, decided.launch.recovery) == ("auto", "live")
    assert decided.model_copy(update={"launch": asked.launch}) == asked


@pytest.mark.parametrize("why", RESTARTS)
def test_others_restart(why, no_gpus):
    assert not with_recovery(recipe(RESTARTS[why])).launch.recovers_live


@linux
def test_with_gpus_a_run_restarts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert not with_recovery(recipe(TWO)).launch.recovers_live


@pytest.mark.core
@linux
def test_a_run_goes_on_without_a_lost_process_by_default(tmp_path):
    """Its recipe leaves the choice to the machine on which it is resumed."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\ntrain: {epochs: 15}\n" + TWO + "observe: {log_every: 1}\n")
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml", "run.name=a"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)  # not forked: torch is not imported yet
    wait_for_steps(tmp_path / "runs" / "a", 3)
    assert json.loads((tmp_path / "runs" / "a" / "job.json").read_text())["recovers_live"], "lockstep resize reads it"
    workers(process)[1].kill()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert "training goes on" in output and "Starting again" not in output and "Exception raised" not in output
    assert summary(tmp_path, "a")["regrouped"]
    kept = parse(Recipe, (tmp_path / "runs" / "a" / "recipe.yaml").read_text(), file="recipe.yaml")
    assert kept.launch.recovery == "auto"


@linux
def test_spares_ask_for_live_recovery(no_gpus):
    assert with_recovery(recipe("launch: {processes: 2, spares: 1}")).launch.recovers_live
    with pytest.raises(ConfigError, match="spares=1 is for recovery: live"):
        recipe("launch: {processes: 2, spares: 1, recovery: restart}")
