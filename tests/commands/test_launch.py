"""The real command line with real processes: the pulse of the whole path, Ctrl-C, kills."""

import json
import os
import signal
import time

import pytest
import torch
from members import further
from running import LONG, SHORT, family, left_of, lockstep, started, summary, typed, wait_for_steps, workers
from safetensors.torch import load_file


@pytest.fixture
def config(tmp_path):
    """A config on the digits, in an empty folder."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    return tmp_path


@pytest.mark.core
def test_pulse(config):
    """Train, kill -9 in mid-epoch, resume, evaluate, export, the first and the last as typed: the digest of the run that was not disturbed."""
    whole = typed(config, "train", "c.yaml", *SHORT, "run.name=whole", "launch.processes=2")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    arguments = ["train", "c.yaml", *SHORT, "run.name=killed", "launch.processes=2", "checkpoint.every_steps=3"]
    arguments.append("launch.max_restarts=0")
    process = started(config, *arguments)
    wait_for_steps(config / "runs" / "killed", 17)
    victim = workers(process)[1]
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"rank 1 (process {victim.pid}) was killed (SIGKILL" in output
    again = lockstep(config, *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed after step" in again.stdout
    assert summary(config, "killed")["digest"] == summary(config, "whole")["digest"]
    assert summary(config, "killed")["evaluation"] == summary(config, "whole")["evaluation"]

    measured = lockstep(config, "evaluate", "runs/killed")
    assert measured.returncode == 0, measured.stderr
    found = json.loads((config / "runs" / "killed" / "evaluation.json").read_text())
    assert found["samples"] == 355
    assert {k: found[k] for k in ("loss", "accuracy", "f1")} == summary(config, "whole")["evaluation"]

    exported = typed(config, "export", "runs/killed")
    assert exported.returncode == 0, exported.stderr
    assert exported.stderr == ""
    weights = load_file(config / "runs" / "killed" / "export" / "model.safetensors")
    assert weights["head.fc2.weight"].shape == (10, 128)
    one = lockstep(config, "export", "runs/whole", "export.kind=state_dict", "export.file=digits.pt", "--to", "out")
    assert one.returncode == 0, one.stderr
    loaded = torch.load(config / "out" / "digits.pt", weights_only=True)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("number", [signal.SIGINT, *further(signal.SIGTERM)], ids=lambda n: n.name)
def test_a_signal_ends_all_processes_and_leaves_a_resumable_run(config, number):
    """Ctrl-C goes to the whole group, SIGTERM to the launcher alone; both end long before grace_seconds (120)."""
    process = started(config, "train", "c.yaml", *LONG, "run.name=a", "launch.processes=2")
    wait_for_steps(config / "runs" / "a", 5)
    everyone = family(process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert "lockstep train" in output
    assert not left_of(everyone, 10)
    done = summary(config, "a")
    assert done["status"] == "interrupted"
    assert (config / "runs" / "a" / "checkpoints" / f"step-{done['steps']:09}" / "manifest.json").exists()
    again = started(config, "train", "runs/a/recipe.yaml", f"train.epochs={done['epochs'] + 0.5}", "--allow-drift")
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    assert f"resumed after step {done['steps']}" in output


def test_ctrl_c_ends_a_run_that_cannot_reach_a_step(config):
    """A rank is stopped, so the others wait in a collective for ever: Ctrl-C still ends all of them."""
    settings = ["launch.processes=2", "launch.grace_seconds=1", "launch.recovery=restart"]
    process = started(config, "train", "c.yaml", *LONG, "run.name=a", *settings)
    wait_for_steps(config / "runs" / "a", 3)
    everyone = family(process)
    frozen = workers(process)[1]
    frozen.suspend()
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert not left_of(everyone, 10)


def test_an_error_in_the_users_code_keeps_its_traceback(config):
    """A data set that fails on one rank: the message names the samples, the file and the line."""
    (config / "mine.py").write_text(
        "import numpy as np\n"
        "from lockstep.data.in_memory import Images\n\n"
        "class Source(Images):\n"
        "    def __getitems__(self, indices):\n"
        "        if 77 in indices:\n"
        "            raise KeyError('sample is broken')\n"
        "        return super().__getitems__(indices)\n\n"
        "def source(options, split):\n"
        "    return Source(np.zeros((100, 1, 8, 8), np.uint8), np.zeros(100, int), ['a', 'b'])\n"
    )
    arguments = ["data.kind=user", "data.file=mine.py", "run.name=a", "launch.processes=2"]
    done = lockstep(config, "train", "c.yaml", *arguments)
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "mine.py" in output
    assert "line 7" in output
    assert "sample 77 of the training split of data.kind=user could not be fetched" in output
    assert "sample is broken" in output


def test_the_users_mistake_comes_without_traceback_from_the_workers_too(config):
    done = lockstep(config, "train", "c.yaml", "data.kind=user", "data.file=nowhere.py", "launch.processes=2")
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("nowhere.py") == 1
