"""Ctrl-C while modules are read, and output whose reader has gone: real processes, their words and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

CONFIG = "data: {kind: digits, limit: 64}\ntrain: {steps: 12, global_batch: 16, micro_batch: 8}\n"
SETTINGS = ["run.name=a", "launch.processes=1", "observe.log_every=1", "observe.sinks=[progress]"]


def started(folder, *arguments, module="lockstep", **options):
    (folder / "c.yaml").write_text(CONFIG)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.STDOUT),
        text=True,
        start_new_session=True,
        **options,
    )


def wait_for_torch(process, seconds=60):
    """Until its library is being read: what comes after it takes seconds more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any("torch" in each.path for each in psutil.Process(process.pid).memory_maps()):
            return
        time.sleep(0.01)
    raise AssertionError("it has not come to torch")


@pytest.mark.parametrize("arguments", [["train", "c.yaml"], ["prove", "c.yaml"]])
def test_ctrl_c_while_modules_are_read(tmp_path, arguments):
    process = started(tmp_path, *arguments)
    wait_for_torch(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "interrupted\n"
    assert process.returncode == 130


def test_a_process_that_a_launcher_has_started_leaves_the_answer_to_it(tmp_path):
    process = started(tmp_path, "c.yaml", "--launcher", str(os.getpid()), module="lockstep.run.worker")
    wait_for_torch(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 75


def test_ctrl_c_is_kept_back_until_it_can_be_answered(tmp_path):
    """As the launchers start their processes: the signal is there before Python is."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = started(tmp_path, "c.yaml", "--launcher", str(os.getpid()), module="lockstep.run.worker")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 75


VANISHES = """
import os, pickle
from multiprocessing import forkserver
from lockstep.{}.{} import PRELOADED
forkserver.set_forkserver_preload([name for name in PRELOADED if name.startswith("lockstep.base.")])
order = pickle.dumps({{"name": "a"}}) + pickle.dumps("what to run")
for sent in (0, 20, len(order) - 1):
    worker, ours = forkserver.connect_to_new_process([])
    os.write(ours, order[:sent])
    os.close(ours)
    forkserver.read_signed(worker)
    assert forkserver.read_signed(worker) == 1
"""


@pytest.mark.parametrize("pool", [("inference.predict", "worker_pool"), ("tools.tune", "trial_process")])
def test_a_process_whose_parent_ended_before_it_said_what_to_run_is_silent(tmp_path, pool):
    """As after Ctrl-C at that moment."""
    (tmp_path / "vanishes.py").write_text(VANISHES.format(*pool))
    done = subprocess.run([sys.executable, "vanishes.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_training_whose_output_nobody_reads_goes_on(tmp_path):
    process = started(tmp_path, "train", "c.yaml", *SETTINGS, stderr=subprocess.DEVNULL)
    assert process.stdout.readline().startswith("run a: ")
    process.stdout.close()
    assert process.wait(timeout=90) == 0
    assert json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())["status"] == "finished"
    assert "step 12" in (tmp_path / "runs" / "a" / "logs" / "rank-0.log").read_text()
    following = started(tmp_path, "logs", "runs/a", "--follow", stderr=subprocess.PIPE)
    following.stdout.close()
    assert following.wait(timeout=60) == 0, "it has nobody to follow for"
    assert following.stderr.read() == ""
    following.stderr.close()


@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_output_that_was_closed_from_the_start_is_no_error(tmp_path, closed):
    """Nor does the next file that is opened take its number, and what is printed."""
    way = ">&-" if closed == "stdout" else ">&- 2>&-"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m lockstep init digits {way}', sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "digits.yaml").read_text().startswith("# lockstep train digits.yaml\n")
