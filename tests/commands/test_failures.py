"""A process dies, freezes, crashes or dawdles: what the others do, and what the user reads."""

import json
import re
import signal
import time

import pytest
from running import family, left_of, lockstep, started, summary, wait_for_steps, workers
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.base.errors import HangDetected, PeerLost
from lockstep.core.host.memory_meter import oom_kills
from lockstep.launch.elastic.failure import failure_of

FAULTY = """
import ctypes
import os
import time
from pathlib import Path

import numpy as np

from lockstep.data.in_memory import Images


def fault(kind):
    if kind == "raise":
        raise KeyError("sample is broken")
    if kind == "sleep":
        time.sleep(SECONDS)
    if kind == "abort":
        os.abort()
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "memory":
        np.zeros(1 << 60, np.uint8)


class Source(Images):
    def __getitems__(self, indices):
        if self.kind == "slow":
            time.sleep(0.2)
        once = Path("once")
        if self.bad in indices and os.environ.get("RANK") == "1" and not once.exists():
            if self.only_once:
                once.touch()
            fault(self.kind)
        return super().__getitems__(indices)


def source(options, split):
    numbers = np.arange(100)
    images = np.repeat(numbers.astype(np.uint8), 64).reshape(100, 1, 8, 8)
    made = Source(images, numbers % 2, ["even", "odd"])
    global SECONDS
    SECONDS = options.get("seconds", 3600)
    made.kind, made.bad, made.only_once = options["fault"], 50 if split == "train" else -1, options.get("once", False)
    return made
"""
SETTINGS = ["data.kind=user", "data.file=mine.py", "run.name=a", "launch.processes=2", "train.epochs=2"]
RESTART = "launch.recovery=restart"
SETTINGS += ["train.global_batch=20", "train.micro_batch=5", "observe.log_every=1", "checkpoint.every_steps=1"]


APART = """
import os

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.steps = nn.Linear(64, 2), 0

    def forward(self, batch):
        self.steps += self.training
        if self.steps == 2 * 4 + 1 and os.environ["RANK"] == "1":  # two micro-batches in each of the steps before
            self.linear.weight.data[0, 0] += 1
        return self.linear(batch["image"].flatten(1) / 255)


def build(options, spec):
    return Model()
"""


def prepare(folder):
    (folder / "mine.py").write_text(FAULTY)
    (folder / "c.yaml").write_text("data: {kind: digits}\n")


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path)
    return tmp_path


def train(folder, fault, *settings):
    return lockstep(folder, "train", "c.yaml", *SETTINGS, f"data.options.fault={fault}", *settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the run without a fault, on one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(folder)
    done = train(folder, "none", "launch.processes=1")
    assert done.returncode == 0, done.stderr
    return summary(folder, "a")["digest"]


def test_a_sample_that_cannot_be_read_is_named_with_the_users_own_lines(folder):
    """In a loader's worker process of one rank; the others do not wait for a time-out."""
    done = train(folder, "raise", "data.workers=1", "launch.max_restarts=0")
    assert done.returncode == 1
    found = done.stdout + done.stderr
    assert found.count("sample 50 of the training split of data.kind=user could not be fetched (step 7, shard 2):") == 1
    assert found.count("KeyError: 'sample is broken'") == 1
    assert [line.split(", ")[1:] for line in found.splitlines() if line.startswith("  |   File")] == [
        ["line 33", "in __getitems__"],
        ["line 14", "in fault"],
    ]
    assert "rank 1 (process " in found
    assert "rank 0" not in found, "it only lost its peer"


def test_a_crash_in_native_code_shows_the_stack(folder):
    done = train(folder, "segfault", "data.workers=0", "launch.max_restarts=0")
    assert done.returncode == 128 + 11
    assert "rank 1 (process " in done.stderr and "crashed in native code (SIGSEGV" in done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr and "line 20 in fault" in done.stderr


def test_a_rank_that_has_failed_by_itself_is_the_cause_also_where_it_was_ended_meanwhile(tmp_path):
    """Its peer has lost it and left first, whereupon the agent ends all others."""
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"message": {"message": "KeyError: x", "extraInfo": {"timestamp": "1"}}}))
    failures = {
        0: ProcessFailure(0, 11, PeerLost.exit_code, str(tmp_path / "none")),
        1: ProcessFailure(1, 12, -signal.SIGTERM, str(error)),
    }
    found = failure_of(failures, tmp_path, oom_kills())
    assert (found.exit_code, found.was_killed) == (1, False)
    assert "rank 1 (process 12) failed with an exception (exit code 1)" in found.text


def test_a_rank_that_dawdles_is_named_and_training_goes_on(folder):
    settings = ["data.workers=0", "data.options.seconds=5", "data.options.once=true"]
    done = train(folder, "sleep", *settings, "observe.hang_seconds=3")
    assert done.returncode == 0, done.stdout + done.stderr
    busy, waiting = (
        r"rank 1 is in mine\.py:16 `fault` for \d s",
        "rank 0 waits in (?:the gradient exchange|an all-gather of objects) of step",
    )
    assert len(re.findall(rf"no progress for \d s in step \d: {busy}; {waiting}", done.stderr)) == 1, done.stderr
    assert "has ended, training goes on" in done.stderr
    (stacks,) = (folder / "runs" / "a" / "logs").glob("hang-step-*.txt")
    text = stacks.read_text()
    assert text.index("rank 0, process") < text.index("rank 1, process")
    assert "in fault" in text


def test_a_collective_that_takes_too_long_restarts_the_run(folder, undisturbed):
    """After a report on what the ranks do; the message names the setting."""
    settings = ["data.options.once=true", "data.options.seconds=9", "launch.collective_timeout_seconds=3", RESTART]
    done = train(folder, "sleep", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    reported = done.stderr.index("rank 1 is in mine.py:16 `fault`")
    given_up = done.stderr.index("rank 0 waited for another process longer than launch.collective_timeout_seconds")
    assert reported < given_up < done.stderr.index("Starting again on 2 processes")
    assert "Traceback" not in done.stderr
    assert summary(folder, "a")["digest"] == undisturbed


def test_a_rank_that_never_comes_back_is_started_again(folder, undisturbed):
    settings = ["data.workers=1", "data.options.once=true", "observe.hang_seconds=3", "observe.on_hang=restart"]
    settings.append(RESTART)
    done = train(folder, "sleep", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rank 1 is in mine\.py:16 `fault` \(its loader's worker process \d+\)", done.stderr), done.stderr
    assert "Starting again on 2 processes" in done.stderr
    assert "Traceback" not in done.stderr
    assert summary(folder, "a")["digest"] == undisturbed


def test_a_frozen_process_is_noticed_and_the_run_goes_on(folder, undisturbed):
    """The agent sees nothing: the process is there. It is the one whose thread watches, so another takes over."""
    settings = ["data.options.fault=slow", "launch.failure_timeout_seconds=2", "launch.processes=2", RESTART]
    process = started(folder, "train", "c.yaml", *SETTINGS, *settings)
    wait_for_steps(folder / "runs" / "a", 2)
    frozen = workers(process)[0]
    frozen.suspend()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    expected = rf"rank 0 \(process {frozen.pid}\) has sent no heartbeat for \d s: it is stopped"
    assert len(re.findall(expected, output)) == 1, output
    assert f"rank 0 (process {frozen.pid}) was killed (SIGKILL" in output
    assert "Starting again on 2 processes" in output
    assert "Traceback" not in output
    assert summary(folder, "a")["digest"] == undisturbed


STOP = """
import atexit
import signal


def stop():
    if os.environ.get("RANK") == "1" and not Path("stopped").exists():
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


"""
WHEN = {
    "at the import": "stop()",
    "before its first heartbeat": "build = source",
    "at its end": "atexit.register(stop)",
}
STOPPING_SOURCE = """


def source(options, split):
    stop()
    return build(options, split)
"""


@pytest.mark.parametrize("kind", ["local", pytest.param("spawn", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("when", WHEN)
def test_a_process_that_is_stopped_while_nobody_hears_its_heartbeats(folder, undisturbed, kind, when):
    """Before there is a process group, before its first heartbeat, and after its last."""
    text = FAULTY + STOP + WHEN[when] + "\n"
    (folder / "mine.py").write_text(text + STOPPING_SOURCE if when == "before its first heartbeat" else text)
    settings = [f"launch.kind={kind}", "launch.failure_timeout_seconds=2", *([RESTART] if kind == "local" else [])]
    done = train(folder, "none", *settings)
    assert (folder / "stopped").exists()
    assert "Traceback" not in done.stderr
    if kind == "spawn":
        assert done.returncode in (128 + signal.SIGKILL, HangDetected.exit_code), done.stderr
        done = train(folder, "none", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(folder, "a")["digest"] == undisturbed


def test_weights_that_come_apart_stop_the_run(folder):
    (folder / "model.py").write_text(APART)
    settings = ["model.kind=user", "model.file=model.py", "observe.desync_every=3", "checkpoint.keep=20"]
    done = train(folder, "none", *settings)
    assert done.returncode == 4, done.stdout + done.stderr
    expected = """the ranks' weights are no longer equal, first seen after step 6 (equal after step 3):
  network.linear.weight: ranks 0-1 differ"""
    assert done.stderr.count(expected) == 1, done.stderr
    assert "Traceback" not in done.stderr
    left = sorted(path.name for path in (folder / "runs" / "a" / "checkpoints").glob("step-*"))
    assert left == ["step-000000001", "step-000000002", "step-000000003"]
    assert len(list((folder / "runs" / "a" / "checkpoints").glob("set-aside-*"))) >= 2


def test_when_the_launcher_is_killed_its_processes_end(folder):
    process = started(folder, "train", "c.yaml", *SETTINGS, "data.options.fault=slow", "train.epochs=100")
    wait_for_steps(folder / "runs" / "a", 2)
    everyone = family(process)
    process.kill()
    process.communicate()
    assert not left_of(everyone, 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_launch_that_is_ended_at_once(folder, number):
    """Its processes have just been made, and read what they import: nobody watches yet."""
    process = started(folder, "train", "c.yaml", *SETTINGS, "data.options.fault=slow", "train.epochs=100")
    end = time.monotonic() + 60
    while len(everyone := family(process)) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    assert len(everyone) >= 3 and not left_of(everyone, 30)
    process.communicate()


def test_sigterm_is_graceful_with_loader_workers_too(folder):
    """The agent sends it to whole process groups."""
    process = started(
        folder, "train", "c.yaml", *SETTINGS, "data.options.fault=slow", "data.workers=2", "train.epochs=100"
    )
    wait_for_steps(folder / "runs" / "a", 3)
    everyone = family(process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert not left_of(everyone, 30)
    done = summary(folder, "a")
    assert done["status"] == "interrupted"
    assert (folder / "runs" / "a" / "checkpoints" / f"step-{done['steps']:09}" / "manifest.json").exists()


def test_a_time_limit_is_kept(folder):
    done = train(folder, "slow", "train.max_minutes=0.15", "train.epochs=100")
    assert done.returncode == 75, done.stdout + done.stderr
    facts = summary(folder, "a")
    assert facts["status"] == "interrupted"
    assert f"stopped since train.max_minutes=0.15 are over after step {facts['steps']}" in done.stderr
    assert "go on with: lockstep train" in done.stderr
    assert (folder / "runs" / "a" / "checkpoints" / f"step-{facts['steps']:09}" / "manifest.json").exists()


def test_a_second_signal_ends_at_once(folder):
    """The first one waits for the end of a step, which does not come."""
    process = started(folder, "train", "c.yaml", *SETTINGS, "data.options.fault=sleep", "data.workers=1")
    wait_for_steps(folder / "runs" / "a", 5)
    everyone = family(process)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert not left_of(everyone, 30)
