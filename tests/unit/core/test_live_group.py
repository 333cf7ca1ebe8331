"""Process groups with live recovery, when a member is lost at a moment that Gloo does not notice."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from lockstep.protocol import run_secret
from lockstep.protocol.live_messages import NAME, PORT, Formation, LiveMessages
from lockstep.protocol.store_server import StoreServer

pytestmark = pytest.mark.timeout(120)
CONNECTING = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from lockstep.base.errors import PeerLost
from lockstep.core.distributed import process_group
from lockstep.protocol.live_messages import store_at
from lockstep.protocol.rendezvous import Endpoint

rank = int(sys.argv[1])
hour = timedelta(hours=1)
store = store_at(Endpoint(host="127.0.0.1", port=int(sys.argv[2])), timeout=hour)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=hour)
if rank == 2:
    dist.all_reduce(torch.zeros(1))  # the others see that it has come
    os._exit(0)
began = time.monotonic()
try:
    process_group.further_group(hour)
except (PeerLost, RuntimeError) as error:
    lost = isinstance(error, PeerLost) or process_group.is_lost_peer(error)
    print("lost" if lost and time.monotonic() - began < 30 else repr(error))
os._exit(0)
"""
STUCK = """
import sys, time
from lockstep.core.distributed.live_group import LiveGroup
from lockstep.core.host import activity

group = LiveGroup(sys.argv[1], joins=False, timeout_seconds=60)
print("ready", flush=True)
with activity.waiting_in("the gradient exchange"):
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path):
    """A store, and the variables of workers of a run that it belongs to."""
    store = StoreServer(socket.create_server(("127.0.0.1", 0)), timedelta(seconds=60))
    store.open_to(run_secret.create(tmp_path))
    yield (
        store,
        os.environ | {NAME: "0.0.1", PORT: str(store.port), run_secret.VARIABLE: str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    store.close()


def process(code, *words, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], **pipes, **options)


def test_a_process_that_is_lost_while_another_group_is_opened(place):
    """The group's own timeout is an hour."""
    store, environment = place
    running = [process(CONNECTING, rank, store.port, env=environment) for rank in range(3)]
    said = [each.communicate(timeout=90) for each in running]
    assert [output for output, _ in said] == ["lost\n", "lost\n", ""], said


def test_a_process_that_stays_in_a_collective_is_killed(place):
    """As if Gloo had not noticed that the connections are closed."""
    store, environment = place
    notes = LiveMessages(store)
    notes.publish(Formation(version=1, generation=1, members=("0.0.1",), is_training=True))
    one = process(STUCK, "0.0.1", env=environment)
    assert one.stdout.readline() == "ready\n"
    time.sleep(0.5)
    notes.publish(Formation(version=2, generation=1, members=("0.0.1",), is_training=True, is_broken=True))
    _, errors = one.communicate(timeout=60)
    assert one.returncode == -signal.SIGKILL
    assert "the gradient exchange does not end though its connections are closed" in errors
