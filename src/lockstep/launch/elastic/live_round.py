"""One round of a machine's workers with launch.recovery=live: training goes on while workers and machines change."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from torch.distributed import DistError

from lockstep.launch.elastic.failure import Failure, node_failure
from lockstep.launch.elastic.live_coordinator import Coordinator
from lockstep.launch.elastic.live_slots import RESIZE
from lockstep.launch.elastic.live_workers import LiveWorkers
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.elastic.worker_processes import POLL_SECONDS
from lockstep.launch.elastic.worker_round import FAILED_SECONDS, PAUSE_SECONDS, Round, RoundEnded
from lockstep.protocol.live_messages import Formation, MachineState

BUSY_POLL_SECONDS = 0.003
"""Pause between two checks of the workers while a formation is broken."""
FINISH_SECONDS = 2.0
"""How much later than rank 0 the others may exit."""


class LiveRound(Round):
    def __init__(self, workers: LiveWorkers, membership: Membership, state_copies: int | None = None) -> None:
        """`state_copies`: see Plan."""
        super().__init__(workers)
        self.workers: LiveWorkers = workers
        self.membership, self.state_copies = membership, state_copies
        self.coordinator: Coordinator | None = None
        """Coordinator of the run, on the leader."""
        self.published: MachineState | None = None

    def run(self, round_end: Callable[[], RoundEnded | None]) -> Failure | None:
        if self.membership.is_leader:
            (self.workers.start.logs.parent / RESIZE).unlink(missing_ok=True)  # of an earlier start
        return super().run(round_end)

    def _is_over(self) -> bool:
        """Look at the workers, and have them go on in the newest formation -> whether the round is over."""
        workers = self.workers
        workers.look()
        workers.follow(self._exchange_states())
        if workers.formation.is_over:
            workers.wait_for_exits(FINISH_SECONDS)
            workers.failures.clear()
            return True
        if workers.failures:
            workers.wait_for_exits(FAILED_SECONDS)
            return True
        return self.coordinator is not None and self.coordinator.is_dead

    def _failure(self) -> Failure | None:
        coordinator = self.coordinator
        if self.workers.failures or self.workers.formation.is_over or coordinator is None:
            return super()._failure()
        return self._death(coordinator)

    def _pause(self) -> None:
        if self.workers.formation.is_broken:
            time.sleep(BUSY_POLL_SECONDS)
        elif not (self.membership.is_alone and self.workers.is_calm):
            time.sleep(POLL_SECONDS)
        else:
            self.workers.pause(PAUSE_SECONDS)

    def _interrupt(self, number: signal.Signals) -> None:
        if self.membership.can_withdraw:
            self._end(signal.SIGKILL)
        else:
            super()._interrupt(number)

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
            membership.publish(live=asdict(state))
            self.published = state
        newest = membership.round.formation
        if not membership.is_leader:
            return newest
        if self.coordinator is None:
            self.coordinator = Coordinator(str(membership.meeting), membership.node_name, self.state_copies)
        machines = {membership.index: state, **membership.machine_states(state.round)}
        formation = self.coordinator.look(machines, membership.round.members)
        if formation.version > newest.version:
            membership.publish_round(formation=formation)
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
