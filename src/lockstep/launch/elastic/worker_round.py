"""One round of a machine's workers: from their start until all have exited."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from lockstep.base import ctrl_c
from lockstep.base.errors import Interrupted
from lockstep.core.host import signals
from lockstep.launch.elastic.failure import Failure
from lockstep.launch.elastic.fork_server import SIGNALS
from lockstep.launch.elastic.worker_processes import WorkerProcesses
from lockstep.launch.launch_config import LaunchSection

FAILED_SECONDS = 15.0
"""After a failure, how long other workers may take to exit by themselves and finish a checkpoint."""
PAUSE_SECONDS = 0.1
"""Longest pause between two checks whether the round is to end."""
RANKS_SECONDS = 10.0
"""How much later than the ranks, which watch each other and report more, the launcher ends stopped workers."""


def stopped_limit(section: LaunchSection, world_size: int) -> float:
    """Return for how many seconds a worker may be stopped while others wait for it."""
    return section.failure_timeout_seconds + RANKS_SECONDS if world_size > 1 else math.inf


class RoundEnded(Exception):  # noqa: N818 (no error: the leader has ended the round)
    """Raised to end the round; if `is_graceful`, by a signal after which workers save a checkpoint."""

    def __init__(self, reason: str, *, is_graceful: bool) -> None:
        super().__init__(reason)
        self.is_graceful = is_graceful


class SignalReceived(Exception):  # noqa: N818 (as KeyboardInterrupt)
    """Raised by the handler of a signal that ends the run."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"got {number.name}")
        self.number = number


class Round:
    """A round that ends with the first failure of a worker; see LiveRound for one that goes on without it."""

    def __init__(self, workers: WorkerProcesses) -> None:
        self.workers = workers

    def run(self, round_end: Callable[[], RoundEnded | None]) -> Failure | None:
        """Start the workers and supervise them to the end -> the failure, if any.

        Raises RoundEnded, and SignalReceived when this process received a signal; both once all workers have exited.
        Raises LaunchError or ServerKilled if a worker cannot be started.
        """
        try:
            self.workers.start_all()
            while True:
                self._pause()
                if (end := round_end()) is not None:
                    if end.is_graceful:
                        self._end(signal.SIGTERM)
                    raise end
                if self._is_over():
                    return self._failure()
        except SignalReceived as error:
            self._interrupt(error.number)
            raise
        finally:
            self.workers.close()

    def _pause(self) -> None:
        """Wait until the next check of the workers, at most until one exits."""
        self.workers.pause(PAUSE_SECONDS)

    def _is_over(self) -> bool:
        """Look at the workers -> whether the round is over."""
        workers = self.workers
        workers.look()
        if first := {*workers.failures}:
            workers.send(signal.SIGTERM)
            workers.wait_for_exits(FAILED_SECONDS)
            workers.failures = {
                slot: each  # without those that have obeyed the signal
                for slot, each in workers.failures.items()
                if slot in first or each.exitcode != Interrupted.exit_code
            }
        return not workers.running or bool(workers.failures)

    def _failure(self) -> Failure | None:
        return self.workers.failure()

    def _interrupt(self, number: signal.Signals) -> None:
        """End the round after a signal: as SIGTERM where workers do not handle that one."""
        self._end(number if number in signals.SIGNALS else signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        """Have the workers save and exit in the grace period."""
        self.workers.send(number)
        self.workers.wait_for_exits(self.workers.start.grace_seconds)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise SignalReceived on signals, if this is the main thread: no other thread can handle them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[float] = []

    def stop(number: int, _: object) -> None:
        if not received or time.monotonic() - received[0] > ctrl_c.ECHO_SECONDS:
            received.append(time.monotonic())
            raise SignalReceived(signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_children(keep: set[psutil.Process]) -> None:
    """Kill the descendants of this process, except for `keep`."""
    for child in set(psutil.Process().children(recursive=True)) - keep:
        with suppress(psutil.Error):
            child.kill()
