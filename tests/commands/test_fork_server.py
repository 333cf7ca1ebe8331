"""Workers that are forked: as isolated as new processes, with the same weights; and the end of their server."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from running import LONG, SHORT, left_of, lockstep, started, summary, typed, wait_for_steps, workers

USER_CODE = """
import atexit, json, multiprocessing, os, signal, sys
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
    def forward(self, batch):
        return self.head(batch["image"].flatten(1) / 255)

def build(options, spec):
    names = [name for name in dir(signal) if name.startswith("SIG") and "_" not in name]
    facts = {
        "environment": {k: v for k, v in os.environ.items() if "PORT" not in k},
        "path": sys.path,
        "threads": __import__("torch").get_num_threads(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "cwd": os.getcwd(),
        "ignored": [name for name in names if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN],
        "files": [os.path.basename(os.readlink(f"/proc/self/fd/{n}")).partition(":")[0] for n in (0, 1, 2)],
        "leads": os.getpgrp() == os.getpid(),
        "argv": sys.argv[1:2],
        "stdin": sys.stdin.fileno(),
        "process": multiprocessing.current_process().name,
        "start method": multiprocessing.get_start_method(allow_none=True),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    mark = Path(f"atexit-{os.environ['LOCKSTEP_TEST_KIND']}-{os.environ['RANK']}")
    atexit.register(mark.touch)
    Path(f"facts-{os.environ['LOCKSTEP_TEST_KIND']}-{os.environ['RANK']}.json").write_text(json.dumps(facts))
    return Net()
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    return tmp_path


def server_of(process):
    found = [p for p in psutil.Process(process.pid).children() if p.name() == "lockstep-fork"]
    return found[0] if found else None


OF_A_RUN = ("LOCKSTEP_TEST_KIND", "TORCHELASTIC_ERROR_FILE", "LOCKSTEP_SECRET", "LOCKSTEP_LIVE_TERMINAL")
"""Variables whose values name files of a run."""


def test_a_forked_worker_begins_like_a_new_process(config):
    """The same environment, signals, threads and import path, and the same weights."""
    (config / "net.py").write_text(USER_CODE)
    settings = [*SHORT, "train.epochs=1", "model={kind: user, file: net.py}", "launch.processes=2"]
    facts = {}
    for kind, more in {"forked": [], "new": ["launch.environment={LOCKSTEP_TEST_KIND: new}"]}.items():
        environment = {**os.environ, "LOCKSTEP_TEST_KIND": kind}
        done = typed(config, "train", "c.yaml", *settings, f"run.name={kind}", *more, env=environment)
        assert done.returncode == 0, done.stderr
        for rank in (0, 1):
            assert (config / f"atexit-{kind}-{rank}").exists()
            facts[kind, rank] = json.loads((config / f"facts-{kind}-{rank}.json").read_text())
            for name in OF_A_RUN:
                del facts[kind, rank]["environment"][name]
            facts[kind, rank]["argv"] = [word.replace(f"/{kind}/", "/RUN/") for word in facts[kind, rank]["argv"]]
    assert facts["forked", 0] == facts["new", 0]
    assert facts["forked", 1] == facts["new", 1]
    assert summary(config, "forked")["digest"] == summary(config, "new")["digest"]
    assert summary(config, "forked")["first_step_seconds"] > 1, "imports count, whoever did them"


def test_a_killed_server_takes_its_workers_along_and_the_run_goes_on(config):
    arguments = ["train", "c.yaml", *SHORT, "launch.processes=2", "checkpoint.every_steps=3"]
    arguments.append("launch.recovery=restart")
    whole = lockstep(config, *arguments, "run.name=whole")
    assert whole.returncode == 0, whole.stderr
    process = started(config, *arguments, "run.name=killed")
    wait_for_steps(config / "runs" / "killed", 10)
    ranks = workers(process)
    assert [rank.ppid() for rank in ranks] == [server_of(process).pid] * 2
    server_of(process).kill()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert "was killed (SIGKILL" in output and "Starting again" in output, output
    assert not left_of(ranks, 10)
    assert summary(config, "killed")["digest"] == summary(config, "whole")["digest"]


def test_a_killed_launcher_leaves_nothing(config):
    process = started(config, "train", "c.yaml", *LONG, "run.name=long", "launch.processes=2")
    wait_for_steps(config / "runs" / "long", 3)
    family = [server_of(process), *workers(process)]
    process.kill()
    process.communicate(timeout=30)
    assert not left_of(family, 20)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.matrix) for number in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_to_all_processes_is_left_to_the_workers(config, number):
    """As from a scheduler: the server neither ends nor ends them before they have saved."""
    process = started(config, "train", "c.yaml", *LONG, "run.name=long", "launch.processes=2")
    wait_for_steps(config / "runs" / "long", 3)
    family = [server_of(process), *workers(process)]
    family[0].send_signal(number)
    time.sleep(0.5)
    assert all(each.is_running() for each in family)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "go on with" in output, output
    assert not left_of(family, 10)


LEAVES = """
import os, sys, time
import psutil
from lockstep.launch.elastic.fork_server import ForkServer, WorkerStart

sys.path.insert(0, os.getcwd())
server = ForkServer(["leaves"])
assert server.is_ready()
environment = {**os.environ, "RANK": "0"}
worker = server.fork(WorkerStart(module="leaves", arguments=(), environment=environment, began=time.time()))
while psutil.pid_exists(worker.pid):
    time.sleep(0.01)
worker.terminate()
print("exit code", worker.poll())
server.close()
"""


def test_a_worker_that_has_just_exited_can_still_be_ended(tmp_path):
    """The launcher ends the others when one fails, and may not yet know of a second one that has gone as well."""
    (tmp_path / "leaves.py").write_text("def run(arguments):\n    raise SystemExit(3)\n")
    (tmp_path / "launcher.py").write_text(LEAVES)
    done = subprocess.run([sys.executable, "launcher.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout == "exit code 3\n", done.stderr


DRAWS = """
import os, sys, time
import numpy
from lockstep.launch.elastic.fork_server import ForkServer, WorkerStart

sys.path.insert(0, os.getcwd())
server = ForkServer(["draws"])
assert server.is_ready()
for _ in range(2):
    start = WorkerStart(module="draws", arguments=(), environment=None, began=time.time())
    assert server.fork(start).wait(60) == 0
server.close()
"""


def test_forked_processes_draw_other_numbers_as_new_interpreters_do(tmp_path):
    """Else trials of a proof would agree on what a user's file draws without a seed."""
    (tmp_path / "draws.py").write_text(
        "from numpy import random\ndef run(arguments):\n    print(random.rand())\n    raise SystemExit\n"
    )
    (tmp_path / "launcher.py").write_text(DRAWS)
    done = subprocess.run([sys.executable, "launcher.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert len({*done.stdout.split()}) == 2, done.stdout + done.stderr
