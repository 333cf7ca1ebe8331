"""Where a benchmark's processes run: all on this machine, or each on a machine of its own, as network namespaces."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SUBNET = "10.213.7"


@dataclass(frozen=True, kw_only=True)
class Place:
    """How one rank is started, and with which variables."""

    prefix: tuple[str, ...]
    environment: dict[str, str]


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def loopback(world: int) -> list[Place]:
    """All ranks on this machine."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    return [
        Place(
            prefix=(),
            environment=address
            | {"RANK": str(r), "WORLD_SIZE": str(world), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(world)},
        )
        for r in range(world)
    ]


def can_make_namespaces() -> bool:
    """Namespaces need root and iproute2."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _hub() -> str:
    return f"lockstep-{os.getpid()}-hub"


def set_link(machine: int, state: str) -> None:
    """Cut a machine's cable ("down") or mend it ("up")."""
    _ip("-n", _hub(), "link", "set", f"port{machine}", state)


@contextlib.contextmanager
def namespaces(machines: int, ranks_each: int) -> Iterator[list[Place]]:
    """Machines joined by a bridge over virtual Ethernet, `ranks_each` on each; all is gone afterwards."""
    hub = _hub()
    names = [f"lockstep-{os.getpid()}-{number}" for number in range(machines)]
    with contextlib.ExitStack() as undo:
        for name in (hub, *names):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _ip("-n", hub, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", f"port{number}", "master", "bridge")
            _ip("-n", hub, "link", "set", f"port{number}", "up")
            _ip("-n", name, "address", "add", f"{SUBNET}.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield _places(names, ranks_each)


def _places(names: Sequence[str], ranks_each: int) -> list[Place]:
    address = {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
    world = {"WORLD_SIZE": str(len(names) * ranks_each), "LOCAL_WORLD_SIZE": str(ranks_each)}
    return [
        Place(
            prefix=("ip", "netns", "exec", name),
            environment=address | world | {"RANK": str(number * ranks_each + local), "LOCAL_RANK": str(local)},
        )
        for number, name in enumerate(names)
        for local in range(ranks_each)
    ]


def measured(script: str, name: str, places: Sequence[Place], *, seconds: float, precision: str) -> Any:
    """Start `script --work NAME` as a rank at each place; return the JSON of rank 0's last line."""
    command = [sys.executable, script, "--work", name, "--seconds", str(seconds), "--precision", precision]
    ranks = [
        subprocess.Popen(
            [*place.prefix, *command],
            env=os.environ | place.environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            text=True,
        )
        for number, place in enumerate(places)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=120 + 10 * seconds)
        codes = [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"{name}: exit codes {codes}")
    return json.loads(output.splitlines()[-1])
