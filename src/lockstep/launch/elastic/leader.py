"""The leader (node 0, or its successor): decides a round's members, when it ends, and whether the run restarts."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.base.errors import LaunchError, PeerLost
from lockstep.checkpoint.layout import MANIFEST, listed
from lockstep.launch.elastic.failure import Failure, node_failure
from lockstep.launch.elastic.membership import Membership, RoundState
from lockstep.launch.elastic.worker_round import FAILED_SECONDS
from lockstep.observe.diagnose.hang_watch import VERDICT
from lockstep.protocol import run_secret
from lockstep.protocol.live_messages import Formation
from lockstep.protocol.rendezvous import serve_store
from lockstep.protocol.store_server import StoreServer

LAST_CALL_SECONDS = 10.0
"""How long the rendezvous stays open for more nodes once launch.nodes' minimum has joined; torchelastic's last call."""
QUIET_SECONDS = 2.0
"""How long the rendezvous waits before it logs that it waits."""


class Leader:
    """The leader's decisions over the rounds of a run."""

    def __init__(self, membership: Membership, logs: Path, *, process_multiple: int = 1) -> None:
        """`process_multiple`: see Plan."""
        self.membership, self.section, self.logs = membership, membership.section, logs
        self.process_multiple = process_multiple
        self.store: StoreServer | None = None
        """Store of the round, through which its processes connect."""
        self.restarts, self.restarts_without_progress, self.max_processes = 0, 0, 0
        self.last_signature = ""
        """Signature of the last failure, see Failure."""
        self.is_restart = False
        """Whether the next round is a restart after a failure."""
        self.checkpoints = checkpoint_times(logs)

    # ---- rendezvous

    def start_round(self) -> RoundState:
        """Wait for the nodes and start the next round. Raises LaunchError, PeerLost."""
        members = self._rendezvous()
        number = self.membership.round.number + 1
        if self.is_restart:
            sys.stderr.write(
                f"Starting again on {self._size(members)} from {newest_checkpoint(self.logs) or 'the beginning'} "
                f"(restart {self.restarts} of {self.section.max_restarts}).\n"
            )
        elif number > 1:
            sys.stderr.write(f"Going on with {self._size(members)}.\n")
        rotate_logs(self.logs)
        if self.store is not None:
            self.store.close()
        # a new store: the last one has addresses of processes that have ended
        self.store = serve_store(replace(self.membership.endpoint, port=0)).open_to(run_secret.create(self.logs.parent))
        plan = {
            "resume": number > 1 and bool(self.checkpoints),  # --resume never or PATH is for the first round
            "max_processes": self.max_processes,
            "port": self.store.port,
            "sizes": [self._processes(index) for index in members],
        }
        return self.membership.publish_round(
            number=number, members=tuple(members), plan=plan, end_reason="", is_graceful=False, formation=Formation()
        )

    def _rendezvous(self) -> list[int]:
        """Wait for up to max_nodes, or for min_nodes and the last call -> the members."""
        membership, section, start = self.membership, self.section, time.monotonic()
        enough_since, logged = None, ""
        while True:
            present, now = membership.present(), time.monotonic()
            if len(present) >= section.max_nodes:
                return present[: section.max_nodes]
            if (rejection := membership.rejection()) and not membership.round.number:
                raise rejection
            if len(present) >= section.min_nodes:
                enough_since = enough_since or now
                if now - enough_since > LAST_CALL_SECONDS:
                    return present
            else:
                self._check_timeout(len(present), now - start)
            message = f"{len(present)} of {section.max_nodes} machines have joined"
            if message != logged and now - start > QUIET_SECONDS:
                sys.stderr.write(f"{message}; waiting for more at {membership.endpoint}\n")
                logged = message
            membership.wait(lambda: False, seconds=0.2)

    def _check_timeout(self, present: int, waited: float) -> None:
        needed, is_first = self.section.min_nodes, not self.membership.round.number
        if not is_first and not self.section.REJOINS:
            raise PeerLost(
                f"{present} of {needed} machines are left, too few to go on (launch.nodes={self.section.nodes})"
            )
        if waited > self.section.join_timeout_seconds:
            text = f"only {present} of {needed} machines joined within {waited:.0f} s"
            if not is_first:
                raise PeerLost(f"{text} after one was lost (launch.join_timeout_seconds)")
            raise LaunchError(
                f"{text} at {self.membership.endpoint} (launch.join_timeout_seconds): run the same command with "
                f"--node-rank 1{f' to {needed - 1}' if needed > 2 else ''} on the others",
                code="LS-NODE-01",
            )

    # ---- the end of a round

    @staticmethod
    def check_round(membership: Membership) -> None:
        """End the running round when a member is lost or has failed, or when another node has joined."""
        state = membership.round
        if state.end_reason:
            return
        lost = [i for i in state.members if membership.is_lost(i)]
        failed = [i for i in state.members if membership.seconds_since_failure(i, state.number) > FAILED_SECONDS]
        new = [i for i in membership.present() if i not in state.members]
        if state.formation.is_training and (lost or new) and not failed:
            _go_on(membership, lost=lost, new=new)
        elif lost:
            membership.evict(lost)
            membership.publish_round(end_reason=f"{membership.node_name(lost[0])} is lost", is_graceful=False)
        elif failed:
            reason = f"workers of {membership.node_name(failed[0])} have failed"
            membership.publish_round(end_reason=reason, is_graceful=False)
        elif new and len(state.members) < membership.section.max_nodes:
            name = membership.node_name(new[0])
            sys.stderr.write(f"{name} has joined: the run saves a checkpoint, and goes on with it\n")
            membership.publish_round(end_reason=f"{name} joins", is_graceful=True)

    def finish_round(self, state: RoundState, own: Failure | None) -> int | None:
        """Wait until all members have ended the round -> the run's exit code, or None for another round."""
        others = [index for index in self.membership.round.members if index != self.membership.index]
        is_over = self.membership.round.formation.is_over
        self._wait_for_outcomes(state, others, has_failed=own is not None)
        if is_over:
            return self._end(0, "")
        failures = [own] if own else []
        for index in others:
            failures += self._failure_of(index, state)
        if failures:
            return self._restart_or_end(min(failures, key=lambda failure: failure.priority), state)
        if not self.membership.round.end_reason:
            return self._end(0, "")
        self.checkpoints, self.is_restart = checkpoint_times(self.logs), False
        return None

    def _wait_for_outcomes(self, state: RoundState, others: Sequence[int], *, has_failed: bool) -> None:
        """Wait until every other member has reported its outcome, or is lost."""
        membership = self.membership

        def have_ended() -> bool:
            return all(membership.is_lost(i) or membership.outcome(i, state.number) is not None for i in others)

        if has_failed and not membership.wait(have_ended, seconds=FAILED_SECONDS):
            membership.publish_round(end_reason="workers of node 0 have failed", is_graceful=False)
        membership.wait(have_ended, seconds=self.section.grace_seconds + FAILED_SECONDS)

    def _failure_of(self, index: int, state: RoundState) -> list[Failure]:
        outcome = self.membership.outcome(index, state.number)
        if outcome is not None:
            return [Failure(**outcome["failure"])] if outcome["failure"] else []
        seconds = self.membership.seconds_since_heartbeat(index)
        self.membership.evict([index])
        return [node_failure(f"{self.membership.node_name(index)} has sent no heartbeat for {seconds:.0f} s")]

    # ---- restarts

    def _restart_or_end(self, failure: Failure, state: RoundState) -> int | None:
        """Decide after a failure -> the run's exit code, or None for a restart."""
        checkpoints = checkpoint_times(self.logs)
        has_progress = bool(set(checkpoints.items()) - set(self.checkpoints.items()))
        self.checkpoints = checkpoints
        self.restarts_without_progress = 0 if has_progress else self.restarts_without_progress + 1
        is_repeated = bool(failure.signature) and failure.signature == self.last_signature
        self.last_signature = failure.signature
        text = f"{failure.text}\n" if failure.text else ""
        if failure.is_final:
            return self._end(failure.exit_code, text)
        world_size = self._world_size(state.members)
        reason = self._reason_not_to_restart(failure, has_progress=has_progress, is_repeated=is_repeated)
        if reason:
            others = "The other processes were ended too.\n" if world_size > 1 else ""
            return self._end(failure.exit_code, f"{text}{others}{reason}\n{resume_hint(self.logs)}")
        sys.stderr.write(text)
        self.restarts, self.is_restart = self.restarts + 1, True
        fewer = (world_size - 1) // self.process_multiple * self.process_multiple if self.process_multiple else 0
        is_stuck = self.restarts_without_progress > 1 and fewer >= self.section.min_processes
        is_training = self.membership.round.formation.is_training  # then it goes on with fewer itself
        can_shrink = self.membership.is_alone and not is_training
        if can_shrink and is_stuck:
            self.max_processes = fewer
        return None

    def _reason_not_to_restart(self, failure: Failure, *, has_progress: bool, is_repeated: bool) -> str | None:
        if is_repeated:
            return "It is not started again: it has failed twice in the same way, at the same lines."
        if not failure.was_killed and not has_progress:
            return "It is not started again: with no checkpoint since, the same would happen at the same place."
        if self.restarts < self.section.max_restarts:
            return None
        if not self.section.max_restarts:
            return "It is not started again (launch.max_restarts=0)."
        return f"It is not started again after {self.restarts} restarts (launch.max_restarts)."

    def _end(self, code: int, text: str) -> int:
        sys.stderr.write(text)
        self.membership.publish_round(result={"code": code, "text": text})
        return code

    # ---- counts

    def _processes(self, index: int) -> int:
        processes: int = self.membership.entries[index]["processes"]
        return min(processes, self.max_processes) if self.max_processes else processes  # which only a single node has

    def _world_size(self, members: Sequence[int]) -> int:
        return sum(map(self._processes, members))

    def _size(self, members: list[int]) -> str:
        machines = "" if self.membership.is_alone else f" of {_count(len(members), 'machine')}"
        return _count(self._world_size(members), "process") + machines


def _go_on(membership: Membership, *, lost: Sequence[int], new: Sequence[int]) -> None:
    """Continue the round without lost machines, and with new ones (live recovery). Raises PeerLost where most of the
    machines are lost at once: they go on themselves if this one is cut off."""
    state, section = membership.round, membership.section
    gone = {*lost, *state.evicted}
    left = [index for index in state.formation.machines if index not in gone]
    if 2 * len(left) < len(state.formation.machines):
        names = ", ".join(map(membership.node_name, lost))
        raise PeerLost(f"most of the machines are lost at once ({names}), or {membership.name} is cut off from them")
    membership.evict(lost)
    members = [index for index in state.members if index not in lost]
    for index in new[: max(0, section.max_nodes - len(members))]:
        sys.stderr.write(f"{membership.node_name(index)} has joined: its processes start beside the others\n")
        members.append(index)
    if tuple(members) != state.members:
        membership.publish_round(members=tuple(members))


def rotate_logs(logs: Path) -> None:
    """Keep the last round's logs as rank-N.log.before, and delete its error files."""
    for log in logs.glob("rank-*.log"):
        if log.name != "rank-0.log":  # which is appended to
            log.replace(log.with_suffix(".log.before"))
    for file in [*logs.glob(".error-*.json"), *logs.glob(VERDICT)]:
        file.unlink()


def checkpoint_times(logs: Path) -> dict[str, float]:
    """Return name -> modification time of each complete checkpoint of the run that these logs belong to."""
    times = {}
    for folder in listed(logs.parent / "checkpoints"):
        with suppress(OSError):  # deleted meanwhile
            times[folder.name] = (folder / MANIFEST).stat().st_mtime
    return times


def newest_checkpoint(logs: Path) -> str | None:
    return max(checkpoint_times(logs), default=None)


def resume_hint(logs: Path) -> str:
    """Return a line that says how to resume the run of these logs; empty while it has no checkpoint."""
    newest = newest_checkpoint(logs)
    return f"Go on from {newest} with: lockstep train {logs.parent / 'recipe.yaml'}\n" if newest else ""


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural if number > 1 else ''}"
