"""The Slurm cluster of the tests: its hosts are hosts, nodes are lost and found, and nothing is left of it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from cluster import PATIENCE_SECONDS, Cluster, until, why_not
from places import SUPPORT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(4 * PATIENCE_SECONDS)]
MARK = "LOCKSTEP_TEST_SESSION"  # jobs have it, see conftest.py; the cluster itself does not


def script(folder, body, *options):
    """A batch script in a folder; its output goes to `out` beside it, also after a requeue."""
    path = folder / "job.sh"
    lines = [f"#SBATCH {option}" for option in (f"--output={folder}/out", "--open-mode=append", *options)]
    path.write_text("\n".join(["#!/bin/bash", *lines, body]))
    return path


def said(folder):
    """The lines that `script` has written there."""
    return (folder / "out").read_text().splitlines() if (folder / "out").exists() else []


def processes_of(folder):
    """Processes that name the folder in their command, and all in the process tables of hosts there."""
    outside = os.readlink("/proc/self/ns/pid")
    table_of, named = {}, set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            table_of[process.pid] = os.readlink(f"/proc/{process.pid}/ns/pid")
            if str(folder) in process.cmdline():
                named.add(process.pid)
    tables = {table_of[pid] for pid in named} - {outside}
    return named | {pid for pid, table in table_of.items() if table in tables}


def alive(pids):
    return [pid for pid in pids if psutil.pid_exists(pid)]


def named(name, pids):
    """How many of these processes run a program of that name."""
    count = 0
    for pid in pids:
        with suppress(psutil.Error):
            count += psutil.Process(pid).name() == name
    return count


def reaches(slurm, one, other):
    """Whether the daemon on `other` can be connected to from `one`."""
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 6818), timeout=1)"
    return slurm.run(one, sys.executable, "-IS", "-c", connect, other).returncode == 0


def test_hosts_are_apart(slurm):
    """Each has a name, an address, processes and shared memory of its own; files are shared."""
    show = "hostname; hostname -I; ps -e -o comm= | grep -c ^slurmd; ls /dev/shm; pwd; touch /dev/shm/$(hostname)"
    first = slurm.run("node1", "sh", "-c", show).stdout.split()
    second = slurm.run("node2", "sh", "-c", show).stdout.split()
    assert first == ["node1", slurm.address("node1"), "1", os.getcwd()]
    assert second == ["node2", slurm.address("node2"), "1", os.getcwd()]


def test_srun_on_two_nodes(slurm):
    """Started as from a login node, by a program that has the client commands in PATH."""
    command = ["srun", "-N2", "--label", "sh", "-c", "echo $(hostname) $(hostname -I)"]
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    wanted = [f"{task}: node{task + 1} {slurm.address(f'node{task + 1}')}" for task in range(2)]
    assert sorted(done.stdout.splitlines()) == wanted, done.stderr


def test_jobs_import_the_project(slurm, tmp_path):
    job = slurm.submit(script(tmp_path, f"srun {sys.executable} -c 'import lockstep; print(lockstep.__name__)'"))
    slurm.wait_for(job, "COMPLETED")
    assert said(tmp_path) == ["lockstep"]


def test_a_signal_to_a_client_command_reaches_it(slurm):
    """The commands in bin/ are the Slurm commands themselves, not something in between."""
    process = subprocess.Popen(["srun", "sleep", "1000"], env=slurm.environment, stderr=subprocess.PIPE, text=True)
    until(lambda: slurm.run("node1", "pgrep", "-x", "sleep").stdout, "a task")
    process.terminate()
    assert "forcing job termination" in process.communicate(timeout=PATIENCE_SECONDS)[1]


@pytest.mark.matrix
def test_a_killed_node_is_down_and_heals(slurm, tmp_path):
    """Its job is requeued, and starts again when the node is back."""
    job = slurm.submit(script(tmp_path, "echo start $SLURM_RESTART_COUNT; sleep 1000", "--nodes=2"))
    slurm.wait_for(job, "RUNNING")
    before = processes_of(slurm.folder)
    slurm.kill("node2")
    assert before - processes_of(slurm.folder)
    with pytest.raises(ProcessLookupError):
        slurm.run("node2", "true")
    slurm.wait_for_node("node2", "down*")
    slurm.wait_for(job, "PENDING")
    slurm.heal("node2")
    slurm.wait_for(job, "RUNNING")
    until(lambda: "start 1" in said(tmp_path), "a second start")


def test_a_cut_node_is_out_of_reach_and_heals(slurm):
    """Its processes live on."""
    until(lambda: reaches(slurm, "node1", "node2"), "a way to node2")
    slurm.cut("node2")
    assert not reaches(slurm, "node1", "node2")
    assert not reaches(slurm, "head", "node2")
    assert slurm.run("node2", "hostname").stdout == "node2\n"
    slurm.heal("node2")
    until(lambda: reaches(slurm, "node1", "node2"), "a way back")  # whoever was sought in vain is asked for anew


@pytest.mark.matrix
def test_a_preempted_job_is_requeued(slurm, tmp_path):
    """If it is still there when its time of grace is over: one that ends by itself has ended for good."""
    stay = "trap 'echo asked' TERM; echo ready; while :; do sleep 1; done"
    body = f'echo start $SLURM_RESTART_COUNT; srun bash -c "{stay}"'
    job = slurm.submit(script(tmp_path, body, "--nodes=2", "--exclusive"))
    until(lambda: said(tmp_path).count("ready") == 2, "a step on both nodes")
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    slurm.wait_for(urgent, "COMPLETED")
    slurm.wait_for(job, "RUNNING")
    until(lambda: "start 1" in said(tmp_path), "a second start")
    assert "asked" in said(tmp_path)


def test_nothing_remains_after_close(tmp_path):
    """Also of a job that has let go of its children."""
    if why_not():
        pytest.skip(why_not())
    with Cluster(tmp_path / "own", nodes=1, gpus=2) as cluster:
        job = cluster.submit("--gres=gpu:2", "--output=/dev/null", "--wrap=setsid sleep 1000 & sleep 1001")
        cluster.wait_for(job, "RUNNING")
        until(lambda: named("sleep", processes_of(tmp_path / "own")) == 2, "a job's processes")
        started = processes_of(tmp_path / "own")
        assert len(started) >= 12, "keeper, two unshare, four on the head, three on the node, two sleeps"
    assert not alive(started)
    assert not (tmp_path / "own").exists()
    cluster.close()


def test_nothing_remains_of_a_killed_process(slurm, tmp_path):
    """Another cluster, at the same addresses, goes with the process that started it, and so do its client commands."""
    code = "import sys; from cluster import Cluster; Cluster(sys.argv[1], nodes=1).open(); print(flush=True); input()"
    command = [sys.executable, "-c", code, tmp_path / "own"]
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as owner:
        owner.stdout.readline()
        with subprocess.Popen([tmp_path / "own/bin/srun", "sleep", "1000"], stderr=subprocess.DEVNULL) as client:
            until(lambda: named("sleep", processes_of(tmp_path / "own")), "a step")
            started = processes_of(tmp_path / "own")
            owner.kill()
            assert client.wait(timeout=PATIENCE_SECONDS) == -signal.SIGKILL
    until(lambda: not (tmp_path / "own").exists(), "no folder")
    until(lambda: not alive(started), "no process")
    assert slurm.run("head", "sinfo", "-h", "-o", "%D %T", "-p", "batch").stdout == "2 idle\n"
