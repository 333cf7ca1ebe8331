"""Command lines of the tests, their processes and what their runs have written."""

import json
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch
import warm

SHORT = ["train.epochs=4", "data.limit=400", "train.global_batch=32", "train.micro_batch=8", "observe.log_every=1"]
SHORT += ["evaluate.micro_batch=256"]
LONG = ["train.epochs=1000", *SHORT[1:]]


def need_forks():
    """For what a test changes in the process from which workers are forked."""
    if torch.backends.cuda.is_built():
        pytest.skip("a torch that is built for GPUs starts workers as new processes")


def lockstep(folder, *arguments, **options):
    """Run the command line to its end, in a process forked from a warm one."""
    return warm.run(["lockstep", *arguments], cwd=folder, timeout=100, **options)


def typed(folder, *arguments, **options):
    """Run the command line to its end, in a new interpreter."""
    pipes = {"capture_output": True, "text": True, "timeout": 100}
    return subprocess.run([sys.executable, "-m", "lockstep", *arguments], cwd=folder, **pipes, **options)


def started(folder, *arguments):
    """Start the command line in a session of its own, as a terminal does, in a process forked from a warm one."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return warm.Popen(["lockstep", *arguments], cwd=folder, start_new_session=True, **pipes)


def left_of(processes, seconds):
    """Those that still run after this time; a process that has ended may wait for init to reap it."""
    left = []
    for process in psutil.wait_procs(processes, timeout=seconds)[1]:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


def wait_for_steps(run, count, seconds=60):
    """Wait until a run has logged so many steps."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        path = run / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"{run} did not log {count} steps within {seconds} s")


def summary(folder, name):
    return json.loads((folder / "runs" / name / "summary.json").read_text())


def family(process):
    """A process and all below it."""
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def workers(process):
    """The ranks, in order."""
    found = [p for p in family(process) if p.name().startswith("lockstep-r")]
    return sorted(found, key=lambda p: int(p.name().removeprefix("lockstep-r")))
