"""launch.recovery=live: whoever sends nonsense to what a run listens on changes nothing."""

import random
import select
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import psutil
import pytest
import torch.distributed as dist
from chaos import DIGITS, Chaos, differences, final_state, undisturbed
from rank_pool import FORKING
from running import family, started, wait_for_steps, workers
from torch.distributed import DistError

from lockstep.base.errors import PeerLost
from lockstep.core.distributed.authenticated_group import authenticate
from lockstep.protocol.live_messages import PATIENCE
from lockstep.protocol.store_client import connected

CONFIG, BRIEF = (DIGITS.replace("steps: 2000", f"steps: {steps}") for steps in (300, 100))
SECRET = ".secret"
HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
"""What a client of torch's TCPStore says first."""
ATTEMPTS = 250


def listeners(process):
    """Addresses that the processes of a run listen on."""
    found = set()
    for each in family(process):
        with suppress(psutil.Error):
            found |= {tuple(c.laddr) for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return sorted(found)


def nonsense(chance):
    """Garbage, a part of what a client says, or all of it and then garbage."""
    garbage = chance.randbytes(chance.choice([0, 1, 3, 8, 64, 4096]))
    first = struct.pack("!i", 4) + b"null"  # of a client that has been greeted
    large = struct.pack("!i", 2**30) + garbage
    answers = [first + struct.pack("!i", len(garbage)) + garbage, first[: chance.randrange(1, 8)], large]
    http = b"GET / HTTP/1.1\r\n\r\n"
    return chance.choice([garbage, HELLO[: chance.randrange(1, 5)], HELLO + garbage, http, *answers])


def disturb(address, chance, kept):
    """Say nonsense; some connections stay open, some are reset."""
    with suppress(OSError):
        client = socket.create_connection(address[:2], timeout=1)
        client.sendall(nonsense(chance))
        if chance.random() < 0.3:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if chance.random() < 0.2:
            kept.append(client)
        else:
            client.close()


class Recorder:
    """Passes a connection on, and keeps what the client says."""

    def __init__(self, port):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.to, self.said = self.listener.getsockname()[1], port, b""
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        client, _ = self.listener.accept()
        with client, self.listener, socket.create_connection(("127.0.0.1", self.to)) as server:
            sides = {client: server, server: client}
            while True:
                for side in select.select([*sides], [], [])[0]:
                    heard = side.recv(65536)
                    if not heard:
                        return
                    self.said += heard if side is client else b""
                    sides[side].sendall(heard)


def notes_of(run, secret):
    """The port of the launcher's store, which its workers have reported to."""
    for _ in range(5):  # a busy machine answers late
        for connection in psutil.Process(run.pid).net_connections("inet"):
            with suppress(DistError):
                if connection.status == psutil.CONN_LISTEN:
                    client = connected("127.0.0.1", connection.laddr.port, secret, timeout=PATIENCE)
                    if client.check(["formation"]):
                        return connection.laddr.port
        time.sleep(1)
    raise AssertionError("there is none")


def test_a_recorded_connection_is_of_no_use(tmp_path):
    """Nor is another secret; who knows it takes part."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    run = started(tmp_path, "train", "c.yaml", "launch.recovery=live", "launch.processes=2", "run.name=live")
    folder = tmp_path / "runs" / "live"
    wait_for_steps(folder, 1)
    assert (folder / SECRET).stat().st_mode & 0o777 == 0o600
    secret = (folder / SECRET).read_bytes()
    port = notes_of(run, secret)
    recorder = Recorder(port)
    assert connected("127.0.0.1", recorder.port, secret, timeout=PATIENCE).add("came", 1) == 1
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(recorder.said)
            client.settimeout(10)
            with suppress(OSError):
                while client.recv(65536):
                    pass  # until it is dropped
    with pytest.raises(DistError, match="does not know the run's secret"):
        connected("127.0.0.1", port, b"x" * len(secret), timeout=PATIENCE)
    assert connected("127.0.0.1", port, secret, timeout=PATIENCE).add("came", 1) == 2
    seen = "\n".join(" ".join([*process.cmdline(), *process.environ().values()]) for process in family(run))
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=90)
    assert f"21 connections to port {port} were refused" in output, output
    texts = [file.read_bytes() for file in (folder / "logs").rglob("*") if file.is_file()]
    said = b"\n".join([seen.encode(), output.encode(), *texts])
    assert secret not in said and secret.hex().encode() not in said


def prove_to_each_other(rank, port, secret):
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        authenticate(dist.group.WORLD, secret)
    except PeerLost as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "ok"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (b"a" * 32, ["ok", "ok"]),
        (b"b" * 32, [f"what has connected as rank {rank} does not know the run's secret" for rank in (1, 0)]),
    ],
)
def test_processes_prove_to_each_other_that_they_know_the_secret(free_port, other, said):
    with ProcessPoolExecutor(2, mp_context=FORKING) as pool:
        found = [pool.submit(prove_to_each_other, *each) for each in [(0, free_port, b"a" * 32), (1, free_port, other)]]
        assert [each.result(60) for each in found] == said


def test_nonsense_changes_nothing(tmp_path):
    reference, chance, kept, tried = undisturbed(tmp_path, BRIEF), random.Random(3), [], 0
    chaos = Chaos(tmp_path, BRIEF, dawdles=True)
    chaos.start()
    run = chaos.process
    wait_for_steps(tmp_path / "runs" / "live", 1)
    while tried < ATTEMPTS and run.poll() is None:
        for address in listeners(run):
            disturb(address, chance, kept)
            tried += 1
        if tried % 10 == 0 and tried < ATTEMPTS / 2:  # also while they form anew
            with suppress(psutil.Error, IndexError):
                workers(run)[-1].kill()
        time.sleep(0.05)
    code = chaos.finish()
    for client in kept:
        client.close()
    assert code == 0 and tried >= ATTEMPTS, chaos.text()
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []
