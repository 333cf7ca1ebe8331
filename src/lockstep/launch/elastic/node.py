"""What every machine of a run does: start its processes, and again after a loss, as node 0 decides for all."""

import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import Interrupted, LockstepError, PeerLost
from lockstep.launch.elastic.attempt import ProcessStart, RoundEnded, attempt, end_all_but, signals_raised
from lockstep.launch.elastic.environment import environment
from lockstep.launch.elastic.failure import Failure, lost
from lockstep.launch.elastic.leader import Leader
from lockstep.launch.elastic.membership import Decision, Membership
from lockstep.launch.elastic.rendezvous import Endpoint, interface_to
from lockstep.launch.launch_config import LaunchSection

LEAVE_SECONDS = 10.0
"""How long node 0 keeps the store for the others to read what has been decided."""


class Node:
    def __init__(self, meeting: Membership, plan: Plan, logs: Path) -> None:
        self.meeting, self.section, self.logs = meeting, meeting.section, logs
        own = ("--began", f"{time.time():.3f}", "--launcher", str(os.getpid()))
        self.plan = replace(plan, argv=(*plan.argv, *own))

    def run(self) -> int:
        """Run the plan to its end, over restarts -> the exit code: 0, or the one of the first process that failed.

        Raises Interrupted after a signal, once every process has ended; LaunchError where the nodes do not find each
        other, PeerLost where too few are left.
        """
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        os.environ.update(self.plan.environment)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.meeting.tell(processes=self.plan.processes)
        others, patience = set(psutil.Process().children()), LEAVE_SECONDS
        with signals_raised():
            try:
                return self._led() if self.meeting.is_leader else self._following()
            except SignalException as error:
                end_all_but(others)  # after a second signal, which ends at once
                patience = self.section.grace_seconds
                self._dismiss(Interrupted(f"{self.meeting.name} was ended by {error.sigval.name}"))
                raise Interrupted(f"ended by {error.sigval.name}") from None
            except LockstepError as error:
                self._dismiss(error)
                raise
            finally:
                self.meeting.tell(left=True)
                self._let_others_go(patience)

    def _led(self) -> int:
        """As node 0: decide, and take part."""
        leading = Leader(self.meeting, self.logs)
        while True:
            word = leading.called()
            own = self._attempt(word)
            if (code := leading.judged(word, own)) is not None:
                return code

    def _following(self) -> int:
        """As any other node: take part when called, until dismissed."""
        meeting, done = self.meeting, set[int]()
        sys.stderr.write(f"{meeting.name} has joined; rank 0, on node 0, tells how the run goes\n")
        while True:
            meeting.wait(lambda: meeting.word.attempt not in {0, *done} or bool(meeting.word.verdict))
            word = meeting.word
            if word.verdict:
                sys.stderr.write(word.verdict["text"])
                return int(word.verdict["code"])
            if meeting.index in word.members:
                failure = self._attempt(word)
                meeting.tell(outcome={"attempt": word.attempt, "failure": asdict(failure) if failure else None})
            done.add(word.attempt)

    def _attempt(self, word: Decision) -> Failure | None:
        """This node's part of an attempt."""
        plan, argv = word.plan, self.plan.argv
        start = ProcessStart(
            argv=_resuming(argv) if plan["resumes"] else argv,
            processes=min(self.plan.processes, plan["at_most"] or self.plan.processes),
            logs=self.logs,
            grace_seconds=self.section.grace_seconds,
        )
        try:
            return attempt(start, self.meeting, lambda: self._over(word.attempt))
        except RoundEnded as over:
            if self.meeting.is_cut_off():
                raise PeerLost(str(over)) from None
            return None
        except DistError as error:  # before any process was started
            return lost(f"{self.meeting.name}: {str(error).splitlines()[0]}")

    def _over(self, number: int) -> RoundEnded | None:
        """Whether this attempt has to end."""
        meeting = self.meeting
        if meeting.is_cut_off():
            return RoundEnded(meeting.cut_off_text(), kindly=False)
        if meeting.is_leader and not meeting.is_alone:
            Leader.look(meeting)
        word = meeting.word
        if word.attempt == number and word.over:
            return RoundEnded(word.over, kindly=word.kindly)
        return None

    def _dismiss(self, error: LockstepError) -> None:
        """Tell the others that the run ends here."""
        text = f"{error}\n"
        if self.meeting.is_leader:
            verdict = {"code": error.exit_code, "text": text}
            with suppress(DistError):
                self.meeting.decide(replace(self.meeting.word, over=text, kindly=True, verdict=verdict))
        elif isinstance(error, Interrupted):
            failure = Failure(code=error.exit_code, text="", weight=0)
            self.meeting.tell(outcome={"attempt": self.meeting.word.attempt, "failure": asdict(failure)})

    def _let_others_go(self, seconds: float) -> None:
        """On node 0: keep the store until everybody has left."""
        meeting = self.meeting
        if meeting.is_leader and not meeting.is_alone:
            with suppress(SignalException):  # one more signal: wait no longer
                meeting.wait(lambda: meeting.present() == [], seconds=seconds)


def _resuming(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command with `--resume auto` in place of what was asked for."""
    return tuple("auto" if before == "--resume" else word for before, word in zip(("", *argv), argv, strict=False))


def plan_of(section: LaunchSection, request: Request, *, threads: int, shards: int, endpoint: Endpoint | None) -> Plan:
    """The command of a node's processes, and how many of it; raises LaunchError for more processes than GPUs,
    and for what this machine does not have."""
    section.check_machine(threads)
    interface = interface_to(endpoint) if endpoint else None
    return Plan(
        argv=(sys.executable, "-P", "-m", "lockstep.run.worker", str(request.recipe), *request.arguments),
        processes=section.processes_here(threads, shards),
        environment=environment(section, threads=threads, logs=request.folder / "logs", interface=interface),
    )
