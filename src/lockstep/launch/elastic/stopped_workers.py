"""Workers of this machine that a signal or a debugger has stopped: the launcher ends those that stay stopped.

While a run is set up, trained or evaluated, its ranks watch each other by heartbeats and report more about it. This
covers the time before the first heartbeat and after the last.
"""

import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

LOOK_SECONDS = 1.0
FROZEN_SECONDS = 5.0
"""Longest pause between two checks, after which this process counts as stopped itself and older checks are dropped."""
RANKS_SECONDS = 10.0
"""Time that the launcher waits longer than the ranks, so that they come first."""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class StoppedWorkers:
    """Checks the state of the workers, at most once a second."""

    def __init__(self, failure_timeout_seconds: float) -> None:
        self.limit = failure_timeout_seconds + RANKS_SECONDS
        self._since: dict[int, float] = {}
        """Process id -> time at which it was first seen stopped."""
        self._looked = time.monotonic()

    def kill(self, workers: Iterable[int]) -> None:
        """Kill those of these processes that have been stopped for longer than the limit."""
        now = time.monotonic()
        pause = now - self._looked
        if pause < LOOK_SECONDS:
            return
        if pause > FROZEN_SECONDS:
            self._since.clear()
        self._looked = now
        self._since = {pid: self._since.get(pid, now) for pid in workers if is_stopped(pid)}
        for pid, since in self._since.items():
            if now - since > self.limit:
                sys.stderr.write(f"process {pid} has been stopped for {now - since:.0f} s; the others wait for it\n")
                with suppress(psutil.Error):
                    psutil.Process(pid).kill()


def is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in STOPPED
    return False
