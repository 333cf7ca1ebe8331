"""A node of a run: it joins, runs a worker group in each round, and leaves."""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
from torch.distributed import DistError

from lockstep.base import lifetime
from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import Interrupted, LaunchError, LockstepError, PeerLost
from lockstep.launch.elastic import leader_failover
from lockstep.launch.elastic.failure import Failure, node_failure
from lockstep.launch.elastic.fork_server import ForkServer, ServerKilled
from lockstep.launch.elastic.leader import Leader
from lockstep.launch.elastic.live_round import LiveRound
from lockstep.launch.elastic.live_workers import LiveWorkers
from lockstep.launch.elastic.membership import Membership, RoundState
from lockstep.launch.elastic.worker_processes import MachinePlace, WorkerGroupStart, WorkerProcesses
from lockstep.launch.elastic.worker_round import (
    Round,
    RoundEnded,
    SignalReceived,
    kill_children,
    signals_raised,
    stopped_limit,
)
from lockstep.launch.launch_config import LaunchSection
from lockstep.protocol import run_secret
from lockstep.protocol.rendezvous import Endpoint, interface_to

REPLACE_SECONDS = 20.0
"""How long a machine that was lost may take to come back by itself, before another one is asked for."""
Replace = Callable[[int, str], str]
"""Function of a node rank and a rendezvous that requests another machine -> a message for the user; or LaunchError."""


class Replacements:
    """Replacement of the machines that are lost while this node leads the run."""

    def __init__(self, membership: Membership, replace: Replace) -> None:
        self.membership, self.replace = membership, replace
        self._due: dict[int, float] = {}
        """Lost machine, by index -> when another one is asked for."""

    def look(self) -> None:
        """Ask for other machines where that is due; one that is not needed any more when it comes waits for a loss."""
        membership, now = self.membership, time.monotonic()
        evicted, replaced = membership.round.evicted, membership.round.replaced
        for index in evicted:
            if index not in replaced:
                self._due.setdefault(index, now + REPLACE_SECONDS)
        due = [index for index, at in self._due.items() if now > at and index not in replaced]
        if not due:
            return
        membership.publish_round(replaced=(*replaced, *due))
        entries = dict(membership.entries)
        back = {entries[index]["node_rank"] for index in membership.present() if index in entries}
        for index in due:
            if entries.get(index, {}).get("node_rank") not in {None, *back}:
                arguments = (membership.node_name(index), membership.section.max_nodes + index, membership.endpoint)
                threading.Thread(target=self._request, args=arguments, name="replacement", daemon=True).start()

    def _request(self, name: str, rank: int, endpoint: Endpoint) -> None:
        """Request a machine, in a thread of its own, since a scheduler may take its time. The rank is unique: of two
        with one rank, the first is lost."""
        try:
            text = f"{name}: {self.replace(rank, str(endpoint))}"
        except LaunchError as error:
            text = f"{name} is not replaced: {error}"
        sys.stderr.write(f"{text}\n")


TASK = "--task"
"""Worker option; without it a worker trains."""
LEAVE_SECONDS = 10.0
"""How long the leader keeps the store open for the others to read the run's result."""


class Node:
    def __init__(
        self,
        membership: Membership,
        plan: Plan,
        logs: Path,
        *,
        fork_server: ForkServer | None,
        replace: Replace | None = None,
    ) -> None:
        """`replace`: with live recovery, how another machine is started in the place of a lost one, if it can be."""
        self.membership, self.section, self.logs = membership, membership.section, logs
        self.fork_server = fork_server
        self.is_live = self.section.recovers_live and TASK not in plan.argv
        live = (TASK, "train_live") if self.is_live else ()
        self.replacements = Replacements(membership, replace) if replace is not None and self.is_live else None
        self.plan = dataclasses.replace(plan, argv=(*plan.argv, *lifetime.worker_options(), *live))

    def run(self) -> int:
        """Run the plan to its end, over restarts -> the exit code: 0, or that of the first process that failed.

        Raises Interrupted after a signal, once every process has ended; LaunchError if the nodes do not find each
        other, PeerLost if too few are left.
        """
        os.environ.update({**self.plan.environment, run_secret.VARIABLE: str(self.logs.parent.absolute())})
        self.logs.mkdir(parents=True, exist_ok=True)
        self.membership.publish(processes=self.plan.processes)
        other_children, leave_seconds = set(psutil.Process().children(recursive=True)), LEAVE_SECONDS
        with signals_raised():
            try:
                return self._lead(None) if self.membership.is_leader else self._follow()
            except SignalReceived as error:
                kill_children(other_children)  # such as one that was being started
                if self.membership.can_withdraw:
                    self.membership.publish(has_withdrawn=True)
                    sys.stderr.write(f"{self.membership.name} leaves the run ({error.number.name}); the others go on\n")
                    return 0
                leave_seconds = self.section.grace_seconds
                self._announce(Interrupted(f"{self.membership.name} was ended by {error.number.name}"))
                raise Interrupted(f"ended by {error.number.name}") from None
            except LockstepError as error:
                self._announce(error)
                raise
            finally:
                os.environ.pop(run_secret.VARIABLE, None)
                self.membership.publish(left=True)
                self._wait_for_others_to_leave(leave_seconds)

    def _lead(self, ended: "tuple[RoundState, Failure | None] | None") -> int:
        """Lead the run to its end; if given, from where a round has `ended`."""
        leader = Leader(self.membership, self.logs, process_multiple=self.plan.process_multiple)
        while True:
            if ended is None:
                state = leader.start_round()
                ended = state, self._run_round(state)
            if (code := leader.finish_round(*ended)) is not None:
                return code
            ended = None

    def _follow(self) -> int:
        """Take part in the leader's rounds until it publishes the run's result."""
        membership, done = self.membership, {0}
        sys.stderr.write(f"{membership.name} has joined; rank 0 shows the run's progress, on its machine\n")
        while True:
            membership.wait(lambda: self._is_called(done) or bool(membership.round.result))
            state = membership.round
            if state.result:
                sys.stderr.write(state.result["text"])
                return int(state.result["code"])
            if membership.index in state.members:
                failure = self._run_round(state)
                if membership.is_leader:  # since the other one is lost
                    return self._lead((state, failure))
                membership.publish(outcome={"round": state.number, "failure": asdict(failure) if failure else None})
            done.add(state.number)

    def _is_called(self, done: set[int]) -> bool:
        """Return whether this node takes part in a new round; with live recovery, perhaps from the middle of one."""
        state = self.membership.round
        return state.number not in done and (not self.is_live or self.membership.index in state.members)

    def _run_round(self, state: RoundState) -> Failure | None:
        plan, argv = state.plan, self.plan.argv
        start = WorkerGroupStart(
            argv=_resuming(argv) if plan["resume"] else argv,
            processes=min(self.plan.processes, plan["max_processes"] or self.plan.processes),
            logs=self.logs,
            grace_seconds=self.section.grace_seconds,
            fork_server=self.fork_server,
        )
        try:
            return self._round(start, self._place(state)).run(lambda: self._round_end(state.number))
        except RoundEnded as end:
            if self.membership.disconnected():
                raise PeerLost(str(end)) from None
            return None
        except (DistError, ServerKilled) as error:  # before all workers were started
            return node_failure(f"{self.membership.name}: {str(error).splitlines()[0]}")

    def _round(self, start: WorkerGroupStart, place: MachinePlace) -> Round:
        if self.is_live:
            return LiveRound(LiveWorkers(start, place, self.section), self.membership, self.plan.state_copies)
        return Round(WorkerProcesses(start, place, stopped_limit(self.section, place.world_size)))

    def _place(self, state: RoundState) -> MachinePlace:
        membership, sizes = self.membership, state.plan["sizes"]
        place = state.members.index(membership.index)
        joins = bool(state.formation.version)
        return MachinePlace(
            machine=membership.index,
            round=state.number,
            first_rank=0 if joins else sum(sizes[:place]),
            number=place,
            machines=len(state.members),
            world_size=sum(sizes),
            host=membership.endpoint.host,
            port=state.plan["port"],
            joins=joins,
            is_alone=membership.is_alone,
            is_replacement=membership.is_replacement,
        )

    def _round_end(self, number: int) -> RoundEnded | None:
        """Return the end of this round, if it has to end."""
        membership = self.membership
        if (text := membership.disconnected()) and not self._find_successor():
            return RoundEnded(text, is_graceful=False)
        if membership.is_leader and not membership.is_alone:
            Leader.check_round(membership)
            if self.replacements is not None:
                self.replacements.look()
        state = membership.round
        if state.number == number and state.end_reason:
            return RoundEnded(state.end_reason, is_graceful=state.is_graceful)
        return None

    def _find_successor(self) -> bool:
        """Find a successor of the lost leader, or become it -> whether there is one."""
        state = self.membership.round
        can_go_on = self.is_live and state.formation.is_training and self.membership.index not in state.evicted
        return can_go_on and leader_failover.succeed(self.membership, self.logs.parent)

    def _announce(self, error: LockstepError) -> None:
        """Let the other nodes know that the run ends here."""
        text = f"{error}\n"
        if self.membership.is_leader:
            result = {"code": error.exit_code, "text": text}
            with suppress(DistError):
                self.membership.publish_round(end_reason=text, is_graceful=True, result=result)
        elif isinstance(error, Interrupted):
            failure = Failure(code=error.exit_code, text="", priority=0)
            self.membership.publish(outcome={"round": self.membership.round.number, "failure": asdict(failure)})

    def _wait_for_others_to_leave(self, seconds: float) -> None:
        """Keep the leader's store open meanwhile."""
        membership = self.membership
        if membership.is_leader and not membership.is_alone:
            with suppress(SignalReceived):  # one more signal: wait no longer
                membership.wait(lambda: membership.present() == [], seconds=seconds)


def _resuming(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command with `--resume auto`, whatever the user's --resume was."""
    return tuple("auto" if before == "--resume" else word for before, word in zip(("", *argv), argv, strict=False))


def worker_plan(
    section: LaunchSection, request: Request, *, threads: int, shards: int, endpoint: Endpoint | None
) -> Plan:
    """Return a node's worker command and the number of workers. Raises LaunchError for more processes than GPUs, and
    for what this machine lacks."""
    section.check_machine(threads)
    interface = interface_to(endpoint) if endpoint else None
    return Plan(
        argv=(sys.executable, "-P", "-m", "lockstep.run.worker", str(request.recipe), *request.arguments),
        processes=section.processes_here(threads, shards),
        environment=section.variables(threads=threads, logs=request.folder / "logs", interface=interface),
    )
