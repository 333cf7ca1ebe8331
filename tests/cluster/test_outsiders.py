"""Who does not know the secret of a run takes no part in it: another user of the machine, another program."""

import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from members import further
from places import SUPPORT
from rank_pool import FORKING
from running import family, started, summary, wait_for_steps
from torch.distributed import DistError

from lockstep.base.errors import LaunchError, ModelError, PeerLost
from lockstep.base.world import World
from lockstep.core.distributed import group_connections, process_group
from lockstep.core.distributed.messages import decode, encode
from lockstep.core.numerics import seeds
from lockstep.protocol import run_secret
from lockstep.protocol.rendezvous import Endpoint, serve_store
from lockstep.protocol.store_client import StoreClient, connected

STRICT = SUPPORT / "strict_lockstep.py"
NOBODY = 65534
SHORT = """
data: {kind: digits, limit: 200}
train: {steps: 4, global_batch: 32, micro_batch: 8}
checkpoint: {every_steps: 2}
observe: {sinks: [jsonl]}
"""
LONG = SHORT.replace("steps: 4", "steps: 4000").replace("every_steps: 2", "every_steps: 1000")
GPT = """
data: {kind: text, train: poem.txt, context: 16, tokenizer: bytes}
model: {kind: gpt, width: 16, heads: 2, layers: 2}
train: {steps: 2, global_batch: 4, micro_batch: 2}
"""


# ---- the secret


def kept(folder):
    facts = (folder / run_secret.FILE).lstat()
    assert stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o777 == 0o600 and facts.st_uid == os.geteuid()
    return (folder / run_secret.FILE).read_bytes()


def planted(file, kind):
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    elif kind == "link":
        file.with_name("known").write_bytes(b"k" * 32)
        file.with_name("known").chmod(0o600)
        file.symlink_to("known")
    else:
        file.write_bytes(b"k" * (31 if kind == "short" else 32))
        file.chmod(0o666 if kind == "open to all" else 0o640 if kind == "open to a group" else 0o600)
        if kind == "another's":
            os.chown(file, NOBODY, NOBODY)


@pytest.mark.parametrize("kind", ["open to all", "open to a group", "another's", "short", "fifo", "endless", "link"])
def test_a_planted_secret_is_replaced(tmp_path, kind, capsys):
    if kind == "another's" and os.geteuid():
        pytest.skip("only root can give files away")
    planted(tmp_path / run_secret.FILE, kind)
    with suppress(OSError):  # in a worker, which makes none
        assert run_secret.read(tmp_path) != b"k" * 32
    secret = run_secret.create(tmp_path)
    assert secret == kept(tmp_path) != b"k" * 32 and len(secret) == 32
    assert "another secret takes its place" in capsys.readouterr().err
    assert run_secret.create(tmp_path) == secret == run_secret.read(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [run_secret.FILE]


def test_a_secret_that_cannot_be_replaced(tmp_path):
    (tmp_path / run_secret.FILE).mkdir()
    with pytest.raises(LaunchError, match=r"choose another run\.dir"):
        run_secret.create(tmp_path)


def test_processes_that_come_at_once_get_one_secret(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(run_secret.create, [tmp_path] * 64))) == 1


# ---- meeting


def connect_and_wait(port, ready, proves_first):
    """A worker that is killed while it connects: before it has read the greeting, or the answer to its challenge."""
    client = StoreClient("127.0.0.1", port, timeout=timedelta(seconds=60))
    if proves_first:
        client.read_greeting()
        client._connection.send_bytes(b"null")
    client._connection.poll(10)
    ready.set()
    time.sleep(100)


@pytest.mark.parametrize("proves_first", [False, True])
def test_a_worker_that_is_killed_while_it_connects_is_no_stranger(proves_first, capfd):
    secret, store = b"x" * run_secret.BYTES, serve_store(Endpoint(host="127.0.0.1", port=0))
    store.open_to(secret)
    for _ in range(2):
        ready = FORKING.Event()
        worker = FORKING.Process(target=connect_and_wait, args=(store.port, ready, proves_first))
        worker.start()
        assert ready.wait(60)
        worker.kill()
        worker.join()
    with pytest.raises(DistError, match="does not know the run's secret"):
        connected("127.0.0.1", store.port, b"y" * len(secret), timeout=timedelta(seconds=60))
    while store._strangers:
        time.sleep(0.05)
    store.close()
    assert capfd.readouterr().err == (
        f"1 connections to port {store.port} were refused: they did not know the run's secret\n"
    )


def ports(run):
    """Ports that the processes of a run listen on."""
    found = set()
    for each in family(run):
        with suppress(psutil.Error):
            found |= {c.laddr.port for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def takes_anybody(port):
    """Whether torch's store answers there, as it does to everybody: here to its client's greeting and a ping."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as client:
        client.settimeout(0.3)
        client.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BI", 13, 77))
        return client.recv(4) == struct.pack("<I", 77)
    return False


@pytest.mark.parametrize(
    "words",
    [
        ("launch.recovery=restart", "parallel.kind=fsdp"),
        pytest.param(("launch.recovery=live",), marks=pytest.mark.matrix),
        pytest.param(("parallel.kind=pipeline",), marks=pytest.mark.matrix),
        ("launch.kind=spawn",),
    ],
)
def test_no_store_of_a_run_takes_anybody(tmp_path, words):
    (tmp_path / "c.yaml").write_text(LONG)
    run = started(tmp_path, "train", "c.yaml", "run.name=a", "launch.processes=2", *words)
    wait_for_steps(tmp_path / "runs/a", 1)
    try:
        found = ports(run)
        assert takes_anybody(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)
        assert found and not [port for port in found if takes_anybody(port)]
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)


class Guesser:
    """Connects to each new port of a run's processes, and guesses for which rank its connection is taken; other
    connections begin a message and say no more, or say nothing."""

    def __init__(self, run):
        self.run, self.seen, self.connections, self.is_over = run, set(), [], False
        self.thread = threading.Thread(target=self.guess)
        self.thread.start()

    def guess(self):
        while not self.is_over:
            with suppress(psutil.Error):
                for port in ports(self.run) - self.seen:
                    self.seen.add(port)
                    for first in [*(struct.pack("<q", number) for number in range(4)), *[b"\0\0\0", b""] * 20]:
                        with suppress(OSError):
                            self.connections.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                            self.connections[-1].sendall(first)
            time.sleep(0.001)

    def close(self):
        self.is_over = True
        self.thread.join()
        for connection in self.connections:
            connection.close()


@pytest.mark.core
def test_who_guesses_connections_changes_nothing(tmp_path):
    """With recovery=restart, where nobody replaces a group that is not whole."""
    (tmp_path / "c.yaml").write_text(SHORT)
    settings = ["launch.recovery=restart", "launch.processes=2"]
    undisturbed = started(tmp_path, "train", "c.yaml", "run.name=undisturbed", *settings)
    output, _ = undisturbed.communicate(timeout=60)
    assert undisturbed.returncode == 0, output
    run = started(tmp_path, "train", "c.yaml", "run.name=a", *settings)
    guesser = Guesser(run)
    output, _ = run.communicate(timeout=100)
    guesser.close()
    assert run.returncode == 0 and guesser.connections, output
    assert summary(tmp_path, "a")["digest"] == summary(tmp_path, "undisturbed")["digest"]


def opened(rank, port, folder):
    """What a process under torchrun says that has the secret in this folder."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", run_secret.VARIABLE)
    values = (rank, 2, rank, 2, "127.0.0.1", port, folder)
    os.environ |= dict(zip(names, map(str, values), strict=True))
    try:
        with process_group.opened(World.from_environment(), torch.device("cpu"), 10):
            process_group.further_group()
            return "ok"
    except (LaunchError, PeerLost) as error:
        return str(error)


def impersonated(rank, port):
    """As `opened`, by somebody who repeats what the other one says, and names a place of his own to meet."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=30))
    store.set(f"secret-{rank}", store.get(f"secret-{1 - rank}"))
    if rank == 0:
        store.wait(["meeting/number-1"])
        store.set("meeting/place-1", f"127.0.0.1:{port} {'0' * 64}")
    else:
        store.set("meeting/number-1", "0" * 32)
        host, _, place = store.get("meeting/place-1").decode().partition(" ")[0].rpartition(":")
        with pytest.raises(dist.DistNetworkError, match="does not know the run's secret"):
            connected(host, int(place), b"x" * 32, timeout=timedelta(seconds=5))
    time.sleep(12)
    return "tried"


@pytest.mark.parametrize(
    ("rank", "other", "expected"),
    [
        (0, "another", "the processes of this run have different secrets"),
        (1, None, "another program has written where the processes meet"),
        *further((0, "same", "ok"), (0, None, "not all processes have come")),
    ],
)
def test_under_torchrun_processes_prove_who_they_are(tmp_path, free_port, rank, other, expected):
    """Its store takes anybody."""
    for name in ("same", "another"):
        run_secret.create(tmp_path / name)
    task = (opened, 1 - rank, free_port, tmp_path / other) if other else (impersonated, 1 - rank, free_port)
    with ProcessPoolExecutor(2, mp_context=FORKING) as pool:
        own, second = pool.submit(opened, rank, free_port, tmp_path / "same"), pool.submit(*task)
        said, tried = own.result(100), second.result(100)
    assert expected in said and tried in (said, "tried")


# ---- messages


@pytest.mark.parametrize("kind", ["fsdp", *further("pipeline", "ddp", "tensor")])
def test_nothing_is_unpickled(tmp_path, kind):
    (tmp_path / "poem.txt").write_text("the rain in spain stays mainly in the plain\n" * 60)
    (tmp_path / "c.yaml").write_text(GPT if kind == "tensor" else SHORT)
    words = ["train", "c.yaml", f"parallel.kind={kind}", "run.name=a", "launch.processes=2"]
    done = subprocess.run(
        [sys.executable, STRICT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    logs = "".join(path.read_text() for path in (tmp_path / "runs/a/logs").glob("*.log"))
    assert done.returncode == 0, done.stderr + logs


class Unknown:
    """Of no use to another process."""


def test_what_cannot_be_sent_is_said_where_it_is_read():
    for value, text in (
        (Unknown(), "a Unknown cannot be sent"),
        (torch.zeros(2).to_sparse(), "a Tensor cannot be sent"),
    ):
        message = encode({"x": [value]})
        with pytest.raises(ModelError, match=text):
            decode(message)


def test_a_message_makes_no_class_that_is_none_of_data():
    message = encode(World())
    for name in ("subprocess", "Popen"), ("os", "system"), ("lockstep.base.trust", "allow_all"):
        content = bytes(message.tolist())[8:].replace(b"lockstep.base.world", name[0].encode())
        content = content.replace(b'"World"', f'"{name[1]}"'.encode())
        crafted = torch.frombuffer(bytearray(len(content).to_bytes(8, "little") + content), dtype=torch.uint8)
        with pytest.raises((ValueError, TypeError)):
            decode(crafted)


# ---- connections


def test_shutting_connections_down_leaves_other_threads_alone():
    """`gc.get_objects()` in one thread breaks what another builds at that moment, by C code such as tuple(map(...))."""
    before, is_over = sys.getswitchinterval(), threading.Event()

    def shut_down():
        while not is_over.is_set():
            group_connections.shut_down_connections()

    thread = threading.Thread(target=shut_down)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        inputs = (1, 2, (3, 4, (5, 6, [7, 8]), {}), "x") * 3
        for _ in range(20000):
            seeds.views((inputs, {}))
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before)


def test_connections_of_python_stay_open():
    """Of observers, object stores, the launcher's notes."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        with other:
            group_connections.shut_down_connections()
            client.sendall(b"x")
            assert other.recv(1) == b"x"
