"""One round of a machine's workers with launch.recovery=live: training goes on while workers and machines change."""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.launch.elastic.agent import RoundEnded
from lockstep.launch.elastic.failure import Failure, node_failure
from lockstep.launch.elastic.live_coordinator import Coordinator
from lockstep.launch.elastic.live_slots import RESIZE
from lockstep.launch.elastic.live_workers import LiveWorkers
from lockstep.launch.elastic.membership import Membership
from lockstep.protocol.live_messages import Formation, MachineState

POLL_SECONDS, BUSY_POLL_SECONDS, CALM_POLL_SECONDS = 0.02, 0.003, 0.1
"""Pause between two checks of the workers; while a formation is broken; while all train on the only machine."""
FAILED_SECONDS = 15.0
"""After a failure, how long the other workers may take to exit by themselves."""
FINISH_SECONDS = 2.0
"""How much later than rank 0 the others may exit."""


def _has_exit(pids: Iterable[int], seconds: float) -> bool:
    """Return whether one of these processes has exited, or exits within this time."""
    with ExitStack() as stack:
        try:
            poll = select.poll()
            for pid in pids:
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
        except ProcessLookupError:
            return True
        except (AttributeError, OSError):  # this system cannot wait for any process
            time.sleep(POLL_SECONDS)
            return False
        return bool(poll.poll(1000 * seconds))


class LiveRound:
    def __init__(self, workers: LiveWorkers, membership: Membership, state_copies: int | None = None) -> None:
        """`state_copies`: see Plan."""
        self.workers, self.membership, self.state_copies = workers, membership, state_copies
        self.coordinator: Coordinator | None = None
        """Coordinator of the run, on the leader."""
        self.published: MachineState | None = None

    def run(self, round_end: Callable[[], RoundEnded | None]) -> Failure | None:
        """Start the workers and supervise them to the end -> the failure, if any.

        Raises RoundEnded, and SignalException when this process received a signal; both once all workers have exited.
        """
        workers = self.workers
        if self.membership.is_leader:
            (workers.start.logs.parent / RESIZE).unlink(missing_ok=True)  # of an earlier start
        try:
            workers.start_all()
            while True:
                self._pause()
                if (end := round_end()) is not None:
                    self._end(signal.SIGTERM if end.is_graceful else signal.SIGKILL)
                    raise end
                workers.look()
                workers.follow(self._exchange_states())
                if workers.formation.is_over:
                    workers.wait_for_exits(FINISH_SECONDS)
                    return None
                if workers.failures:
                    workers.wait_for_exits(FAILED_SECONDS)
                    return workers.failure()
                if self.coordinator is not None and self.coordinator.is_dead:
                    return self._death(self.coordinator)
        except SignalException as error:
            self._end(signal.SIGKILL if self.membership.can_withdraw else error.sigval)
            raise
        finally:
            workers.close()

    def _pause(self) -> None:
        """Wait until the next check of the workers, at most until one exits."""
        if self.workers.formation.is_broken:
            time.sleep(BUSY_POLL_SECONDS)
        elif not (self.membership.is_alone and self.workers.is_calm):
            time.sleep(POLL_SECONDS)
        elif _has_exit([worker.process.pid for worker in self.workers.running.values()], CALM_POLL_SECONDS):
            time.sleep(BUSY_POLL_SECONDS)  # its exit code comes from the fork server

    def _end(self, number: signal.Signals) -> None:
        """Have the workers save and exit in the grace period; those without a process group get a new one first."""
        workers, end = self.workers, time.monotonic() + self.workers.start.grace_seconds
        workers.begin_end(number)
        while workers.running and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            workers.look()
            with suppress(DistError):  # the leader is lost
                workers.follow(self._exchange_states())
            if self.coordinator is not None and self.coordinator.is_dead:  # those that are left have nothing to save
                return

    def _exchange_states(self) -> Formation:
        """Publish this machine's state -> the newest formation."""
        membership, state = self.membership, self.workers.state()
        if state != self.published and not membership.is_alone:
            membership.publish(live=state.plain())
            self.published = state
        known = membership.round.formation
        newest = Formation.from_plain(known) if known else Formation()
        if not membership.is_leader:
            return newest
        if self.coordinator is None:
            self.coordinator = Coordinator(str(membership.meeting), membership.node_name, self.state_copies)
        machines = {membership.index: state, **membership.machine_states(state.round)}
        formation = self.coordinator.look(machines, membership.round.members)
        if formation.version > newest.version:
            membership.publish_round(formation=asdict(formation))
        return formation

    def _death(self, coordinator: Coordinator) -> Failure | None:
        """Report the loss of all members, or of all that hold a part of the training state -> the failure."""
        size = coordinator.formation.replica_size
        if coordinator.missing and size > 1:
            parts = " and ".join(f"part {part + 1} of {size}" for part in coordinator.missing)
            sys.stderr.write(f"no process is left that holds {parts} of the training state\n")
        if self.workers.deaths:
            self.workers.failures |= self.workers.deaths
            return self.workers.failure()
        return node_failure("; ".join(text for text in coordinator.losses.values() if text))
