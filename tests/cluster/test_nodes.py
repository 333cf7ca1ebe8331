"""Several machines, as network namespaces, each with `lockstep train ... --node-rank N`: what they agree on, and when not."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import warm
from networks import can_make_namespaces, namespaces
from running import left_of

LOCKSTEP = ["lockstep", "train", "c.yaml"]
SETTINGS = ["train.epochs=2", "data.limit=170", "train.global_batch=32", "train.micro_batch=4", "launch.processes=1"]
LONG = ["train.steps=100000", *SETTINGS[1:], "evaluate.every_epochs=null", "checkpoint.every_steps=50"]
NODES = pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2")
PORT = 29433


@pytest.fixture
def top(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    return tmp_path


@pytest.fixture
def machines():
    """Two of them; their addresses end in .1 and .2."""
    with namespaces(machines=2, ranks_each=1) as places:
        host = places[0].environment["MASTER_ADDR"]
        yield [place.prefix for place in places], f"{host}:{PORT}"


@pytest.fixture
def started():
    """Start commands, each with a file that holds what it says; none outlives the test. Where PYTHONPATH is given, in a
    new interpreter, which reads it."""
    processes = []

    def start(command, folder, name, **variables):
        with (folder / f"{name}.out").open("w") as out:
            new, words = (subprocess.Popen, [sys.executable, "-m"]) if "PYTHONPATH" in variables else (warm.Popen, [])
            process = new(
                [*words, *command], cwd=folder, env=os.environ | variables, stdout=out, stderr=subprocess.STDOUT
            )
        process.said = lambda: (folder / f"{name}.out").read_text()
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            process.wait()


def ended(*processes, seconds=100):
    """Wait for the end of all -> exit codes."""
    end = time.monotonic() + seconds
    try:
        return [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("\n----\n".join(process.said() for process in processes))


def until(condition, seconds, *processes):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail("\n----\n".join(process.said() for process in processes))
        time.sleep(0.1)


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-?????????"))


@NODES
def test_two_machines_by_hand(top, machines, started):
    """Neither is told a run's name; a debug mode, and a rank that is left out, change nothing. Node 1 comes first."""
    prefixes, endpoint = machines
    words = [*LOCKSTEP, *SETTINGS, "launch.nodes=2", "launch.debug=true", "--rendezvous", endpoint]
    second = started([*prefixes[1], *words], top, "second")
    time.sleep(1)
    first = started([*prefixes[0], *words, "--node-rank", "0"], top, "first")
    lone = warm.run(["lockstep.run.worker", "c.yaml", *SETTINGS, "run.name=lone"], cwd=top, timeout=100)
    assert lone.returncode == 0, lone.stderr
    assert ended(first, second) == [0, 0], first.said() + second.said()
    (name,) = {path.name for path in (top / "runs").iterdir()} - {"lone"}
    here, there = (json.loads((top / "runs" / run / "summary.json").read_text()) for run in (name, "lone"))
    assert (here["world_size"], here["digest"]) == (2, there["digest"])
    assert "node 1 (" in second.said()
    assert "finished after" in first.said()
    assert not list((top / "runs" / name).glob(".meeting*"))
    shown = warm.run(
        [*LOCKSTEP, "--dry-run", "launch.debug=true", "--rendezvous", "127.0.0.1:1"], cwd=top, timeout=60
    ).stdout
    for line in ("GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo", "TORCH_DISTRIBUTED_DEBUG=INFO", "NCCL_DEBUG=INFO"):
        assert line in shown.splitlines(), shown


@NODES
@pytest.mark.matrix  # tests/cluster shows it on a real cluster
def test_a_machine_leaves_and_another_comes(top, machines, started):
    """launch.nodes=1:2: node 1 is killed, the run goes on without it; one that comes later is taken in; Ctrl-C on one
    machine ends all, with a checkpoint."""
    prefixes, endpoint = machines
    words = [*LOCKSTEP, *LONG, "run.name=a", "launch.nodes=1:2", "launch.failure_timeout_seconds=5"]
    words += ["--rendezvous", endpoint]
    run = top / "runs" / "a"
    first = started([*prefixes[0], *words, "--node-rank=0"], top, "first")
    second = started([*prefixes[1], *words, "--node-rank=1"], top, "second")
    until(lambda: len(checkpoints(run)) > 0, 60, first, second)
    for process in [*psutil.Process(second.pid).children(recursive=True), second]:
        process.kill()
    until(lambda: "Starting again on 1 process of 1 machine" in first.said(), 40, first)
    newest = checkpoints(run)[-1]
    until(lambda: checkpoints(run)[-1] > newest, 40, first)
    third = started([*prefixes[1], *words, "--node-rank=1"], top, "third")
    until(lambda: "Going on with 2 processes of 2 machines" in first.said(), 60, first, third)
    newest = checkpoints(run)[-1]
    until(lambda: checkpoints(run)[-1] > newest, 40, first, third)
    third.send_signal(signal.SIGINT)
    assert ended(first, third, seconds=40) == [75, 75], first.said() + third.said()
    steps = [int(step) for step in re.findall(r"resumed after step (\d+)", first.said())]
    assert len(steps) == 2
    last = int(re.findall(r"interrupted after ([\d,]+) steps", first.said())[-1].replace(",", ""))
    assert 0 < steps[0] < steps[1] < last


@NODES
def test_node_0_is_lost(top, machines, started):
    """The other one ends its processes, and says whom it misses; the same commands go on from the newest checkpoint."""
    prefixes, endpoint = machines
    words = [*LOCKSTEP, *LONG, "run.name=a", "launch.nodes=2", "launch.failure_timeout_seconds=5"]
    words += ["--rendezvous", endpoint]
    first, second = (started([*prefixes[i], *words, f"--node-rank={i}"], top, f"node-{i}") for i in (0, 1))
    until(lambda: len(checkpoints(top / "runs" / "a")) > 0, 60, first, second)
    for process in [*psutil.Process(first.pid).children(recursive=True), first]:
        process.kill()
    first.wait()
    workers = psutil.Process(second.pid).children(recursive=True)
    assert ended(second, seconds=20) == [5]
    assert re.search(r"no answer from .* \(node 0\) for [5-9] s", second.said()), second.said()
    assert "Traceback" not in second.said()
    assert not left_of(workers, 5)


REFUSED = {
    "--rendezvous nonsense": "should be HOST:PORT of the first machine",
    "--rendezvous 192.0.2.7:29400 --node-rank 0": "192.0.2.7 is not an address of this machine",
    "--rendezvous no-such-host.invalid:29400 --node-rank 1": "no-such-host.invalid cannot be resolved",
    "--rendezvous 127.0.0.1:{closed} --node-rank 1": "does not answer (Connection refused)",
    "--rendezvous 127.0.0.1:{taken} --node-rank 0": "of 127.0.0.1 is taken: choose another with --rendezvous",
    "--rendezvous 127.0.0.1:{closed} --node-rank 0": "only 1 of 2 machines joined within",
    "--node-rank 1": "--node-rank needs --rendezvous HOST:PORT",
    "": "run the same command on each machine with --node-rank 0 (1, ...) and --rendezvous HOST:PORT",
}


@pytest.mark.parametrize("place", REFUSED)
def test_places_that_cannot_be_met_at(top, free_port, place):
    """One message, exit code 2, no process started, no traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = place.format(closed=free_port, taken=taken.getsockname()[1]).split()
        command = [*LOCKSTEP, *SETTINGS, "launch.nodes=2", "launch.join_timeout_seconds=2", "run.name=a", *words]
        done = warm.run(command, cwd=top, timeout=60)
    assert done.returncode == 2, done.stderr
    assert REFUSED[place] in done.stderr
    assert "Traceback" not in done.stderr
    assert not (top / "runs" / "a" / "logs" / "rank-1.log").exists()


def pair(started, top, free_port, second, **variables):
    """Two nodes on this machine, the second in its own way -> both."""
    words = ["launch.nodes=2", "launch.join_timeout_seconds=12", "--rendezvous", f"127.0.0.1:{free_port}"]
    one = started([*LOCKSTEP, *SETTINGS, *words, "run.name=a", "--node-rank=0"], top, "one")
    other = started([*LOCKSTEP, *SETTINGS, *words, "run.name=a", "--node-rank=1", *second], top, "other", **variables)
    return one, other


def test_another_version_is_refused_on_both_sides(top, free_port, started):
    """A real installation of another version: its metadata lie in a folder that Python looks into first."""
    info = top / "older" / "lockstep_train-0.0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-train\nVersion: 0.0.9\n")
    one, other = pair(started, top, free_port, [], PYTHONPATH=str(info.parent))
    assert ended(one, other) == [2, 2]
    for node in (one, other):
        assert "has Lockstep 0.0.9, but" in node.said()
        assert "install the same on all machines" in node.said()
        assert "Traceback" not in node.said()


def test_a_folder_that_is_not_shared_is_refused_on_both_sides(top, free_port, started):
    one, other = pair(started, top, free_port, [f"run.dir={top / 'elsewhere'}"])
    assert ended(one, other) == [2, 2]
    for node in (one, other):
        assert "set run.dir to a folder that all machines share" in node.said()
    assert not (top / "elsewhere").exists()


@pytest.mark.matrix
def test_clocks_need_not_agree(top, free_port, started):
    """To Python, node 1 lives a year ago: time limits and ages are told by each machine's own clock, never by two."""
    (top / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() - 365 * 86400\n")
    settings = ["train.max_minutes=5", "checkpoint.every_minutes=0.02", "checkpoint.keep_every_hours=1"]
    one, other = pair(started, top, free_port, settings, PYTHONPATH=str(top))
    assert ended(one, other) == [0, 0], one.said() + other.said()
