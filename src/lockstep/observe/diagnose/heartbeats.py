"""Heartbeats of all ranks through the rendezvous store: which processes are silent, and whether they are lost."""

import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil
from torch.distributed import DistError

from lockstep.observe.diagnose.store_notes import StoreNotes

SIGKILL = 9
ELSEWHERE = 4
"""A process on another machine may be silent this many times as long."""
LEFT = "left"
"""The last heartbeat of a process that ends regularly."""
FROZEN = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)


class Heartbeats:
    """Heartbeats of this rank, and of others that it watches. Methods raise DistError without the store."""

    def __init__(self, notes: StoreNotes, silent_seconds: float) -> None:
        self.notes, self.silent_seconds = notes, silent_seconds
        self._count = 0
        self._seen: dict[int, tuple[Any, float]] = {}
        """Rank -> its last heartbeat, and when it was first seen."""

    def send(self) -> None:
        self._count += 1
        self.notes.write("beat", {"count": self._count, "process": os.getpid(), "host": platform.node()})

    def send_last(self) -> None:
        with suppress(DistError):
            self.notes.write("beat", LEFT)

    def receive(self) -> None:
        """Read the heartbeats of lower ranks up to the first alive one, which watches the others; of all if none is."""
        for lower in range(self.notes.rank):
            self._read([lower])
            if not self.is_silent(lower):
                return
        self._read(list(range(self.notes.size)))

    def forget(self) -> None:
        """Discard observations from before this process was frozen itself."""
        self._seen.clear()

    def silence(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat; 0 for one that has ended regularly or not started."""
        beat, at = self._seen.get(rank, (LEFT, 0.0))
        return 0.0 if beat == LEFT else time.monotonic() - at

    def is_silent(self, rank: int) -> bool:
        return self.silence(rank) > self.silent_seconds

    def is_lowest_alive(self) -> bool:
        return all(self.is_silent(rank) for rank in range(self.notes.rank))

    def silent_ranks(self) -> dict[int, Mapping[str, Any]]:
        """Return rank -> its last heartbeat, with its process and host."""
        return {rank: self._seen[rank][0] for rank in range(self.notes.size) if self.is_silent(rank)}

    def loss(self, rank: int, last: Mapping[str, Any]) -> str | None:
        """Describe why a rank with this last heartbeat is lost or frozen; None if it may be busy in native code."""
        process, host, silence = last["process"], last["host"], self.silence(rank)
        seconds = f"has sent no heartbeat for {silence:.0f} s"
        if host != platform.node():  # its state cannot be seen from here
            is_lost = silence >= ELSEWHERE * self.silent_seconds
            return f"rank {rank} (process {process} on {host}) {seconds}" if is_lost else None
        with suppress(psutil.Error):
            status = psutil.Process(process).status()
            return f"rank {rank} (process {process}) {seconds}: it is {status}" if status in FROZEN else None
        return f"rank {rank} (process {process}) no longer exists"

    def kill_here(self, rank: int) -> None:
        """Kill a process of this machine, which may react to nothing else."""
        beat, _ = self._seen.get(rank, (LEFT, 0.0))
        if beat != LEFT and beat["host"] == platform.node():
            with suppress(OSError):
                os.kill(beat["process"], SIGKILL)

    def _read(self, ranks: list[int]) -> None:
        for rank, beat in self.notes.read("beat", ranks).items():
            if self._seen.get(rank, (None, 0.0))[0] != beat:
                self._seen[rank] = beat, time.monotonic()
