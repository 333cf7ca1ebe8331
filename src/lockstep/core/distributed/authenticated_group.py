"""Opens process groups whose members have proved to belong to the run.

Gloo takes any client that connects to a port of a process, and guesses a small number, for the expected rank. So each
group proves its members before its first collective, within seconds, and is opened again where that fails.
"""

import hmac
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.base.errors import LaunchError, PeerLost, few
from lockstep.core.distributed.group_connections import listening_ports

BYTES = 32


def authenticate(group: dist.ProcessGroup, secret: bytes) -> None:
    """Check that each member knows the secret. Collective. Raises PeerLost where one does not."""
    rank, members = dist.get_rank(), dist.get_process_group_ranks(group)
    challenges = [secrets.token_bytes(BYTES) for _ in members]
    asked = zip(members, _exchanged(challenges, group), strict=True)
    answers = _exchanged([_proof(secret, each, ranks=(rank, other)) for other, each in asked], group)
    for other, challenge, answer in zip(members, challenges, answers, strict=True):
        if not hmac.compare_digest(answer, _proof(secret, challenge, ranks=(other, rank))):
            raise PeerLost(f"what has connected as rank {other} does not know the run's secret")


def _proof(secret: bytes, challenge: bytes, *, ranks: tuple[int, int]) -> bytes:
    """Return the first rank's proof for the second, which nobody in between can pass on as an answer to a third."""
    return hmac.digest(secret, b"%d %d " % ranks + challenge, "sha256")


def _exchanged(messages: Sequence[bytes], group: dist.ProcessGroup) -> list[bytes]:
    """Send each rank its message -> those of all ranks."""
    sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return [bytes(each.tolist()) for each in received.split(BYTES)]


CONNECT_SECONDS = 5.0
"""Seconds that processes may take to connect to each other once all are there."""
MOST_ATTEMPTS = 5
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NOT_CONNECTED = "connectFullMesh failed"
"""Text of Gloo's error when the processes have found each other but cannot open connections."""


def wait_for_all(store: dist.Store, keys: list[str], timeout: timedelta) -> None:
    """Wait for what each rank writes into a store. Raises PeerLost."""
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        raise PeerLost(f"not all processes have come within {timeout.total_seconds():.0f} s") from None


class Attempts:
    """Attempts to open one group, or several that divide all ranks; every rank makes the same ones."""

    def __init__(self, store: dist.Store, secret: bytes, *, rank: int, size: int) -> None:
        self.first = dist.distributed_c10d._world.group_count
        """Number of the first group, which is its name and equal on all ranks."""
        self.store = dist.PrefixStore(f"opening-{self.first}", store)
        self.secret, self.rank, self.size = secret, rank, size
        self.number = 0
        self.seconds = CONNECT_SECONDS + size / 8  # the store answers one request at a time

    def until_proven(self, open_own: Callable[[timedelta], dist.ProcessGroup], timeout: timedelta) -> dist.ProcessGroup:
        """Open this rank's group by `open_own`, which then has `timeout`. Collective. Raises LaunchError, PeerLost."""
        reasons: list[str] = []
        for self.number in range(MOST_ATTEMPTS):
            if self.store.add(f"{self.number}/here", 1) == self.size:
                self.store.set(f"{self.number}/all", "")
            wait_for_all(self.store, [f"{self.number}/all"], timeout)
            dist.distributed_c10d._world.group_count = self.first + self.number * (self.size + 1)  # whatever has failed
            group, reason = self._attempt(open_own)
            reasons = self._reasons(reason)
            if group is not None and not reasons:
                dist.distributed_c10d._set_pg_timeout(timeout, group)
                return group
            if group is not None:
                dist.destroy_process_group(group)
        raise _not_connected(reasons)

    def _attempt(self, open_own: Callable[[timedelta], dist.ProcessGroup]) -> tuple[dist.ProcessGroup | None, str]:
        """Open the group -> the group, if it could be opened, and why it cannot be used, if so."""
        group = None
        try:
            group = open_own(timedelta(seconds=self.seconds))
            authenticate(group, self.secret)
        except (PeerLost, RuntimeError) as error:
            where = f"port {few(ports)}" if (ports := listening_ports()) else "no port any more"
            reason = str(error).partition("\n")[0].rpartition("] ")[2]
            return group, f"rank {self.rank} on {platform.node()}, which listens on {where}: {reason}"
        return group, ""

    def _reasons(self, own: str) -> list[str]:
        self.store.set(f"{self.number}/{self.rank}", own or " ")  # TCPStore gives no empty values
        keys = [f"{self.number}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=6 * self.seconds))
        except dist.DistStoreError:
            raise PeerLost("a process was lost while a process group was opened") from None
        return [text for value in self.store.multi_get(keys) if (text := bytes(value).decode(errors="replace").strip())]

    def once(self, open_own: Callable[[timedelta], dist.ProcessGroup], timeout: timedelta) -> dist.ProcessGroup:
        """Open a group with live recovery, for which a failure is a loss. Raises PeerLost, RuntimeError."""
        dist.all_reduce(torch.zeros(1))
        try:
            group = open_own(timedelta(seconds=self.seconds))
        except RuntimeError as error:
            if NOT_CONNECTED not in str(error) and not isinstance(error, dist.DistStoreError):
                raise
            raise PeerLost("a process was lost while another group was opened") from None
        authenticate(group, self.secret)
        dist.distributed_c10d._set_pg_timeout(timeout, group)
        return group


def _not_connected(reasons: list[str]) -> LaunchError:
    interface = os.environ.get(INTERFACES[0])
    through = f"the network interface {interface}" if interface else "the network"
    return LaunchError(
        f"the processes cannot connect to each other through {through} "
        f"({MOST_ATTEMPTS} attempts; {few(reasons, 1)}): set launch.interface to one by which the machines reach each "
        "other, let them connect to any port of each other, and look for another program that connects to these ports "
        "(LS-NET-05)",
        code="LS-NET-05",
    )
