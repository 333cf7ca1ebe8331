"""What node 0 decides: who takes part in a start, when it is over, and whether there is another."""

import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.base.errors import LaunchError, PeerLost
from lockstep.launch.elastic.failure import VERDICT, Failure, lost
from lockstep.launch.elastic.membership import Decision, Membership
from lockstep.launch.elastic.rendezvous import served

FAILED_SECONDS = 15.0
"""After a failure on one machine, how long the others' processes may take to end by themselves and settle a save."""
LATECOMERS_SECONDS = 10.0
"""Once the fewest machines are there that launch.nodes allows, how long more are waited for."""
AGAIN_ALIKE = "It is not started again: it has failed twice in the same way, at the same lines."
QUIET_SECONDS = 2.0
"""Others that come within this time are waited for without a word."""


class Leader:
    """The decisions of one run, over its starts."""

    def __init__(self, meeting: Membership, logs: Path) -> None:
        self.meeting, self.section, self.logs = meeting, meeting.section, logs
        self.restarts, self.in_vain, self.at_most = 0, 0, 0
        self.alike = ""
        """What the last failure has in common with others of its kind."""
        self.is_again = False
        """Whether the next start is a restart, which is told."""
        self.before = saved(logs)

    # ---- who takes part

    def called(self) -> Decision:
        """Gather the nodes and call them to the next start. Raises LaunchError, PeerLost."""
        members = self._gathered()
        number = self.meeting.word.attempt + 1
        if self.is_again:
            processes = self._processes(members)
            sys.stderr.write(
                f"Starting again on {_count(processes, 'process')}{self._on_machines(members)} from "
                f"{newest(self.logs) or 'the beginning'} (restart {self.restarts} of {self.section.max_restarts}).\n"
            )
        elif number > 1:
            sys.stderr.write(
                f"Going on with {_count(self._processes(members), 'process')}{self._on_machines(members)}.\n"
            )
        clear(self.logs)
        resumes = number > 1 and bool(self.before)  # a start from scratch, or elsewhere, was asked for once
        self.store = served(replace(self.meeting.endpoint, port=0))  # the last one holds addresses of the dead
        plan = {"resumes": resumes, "at_most": self.at_most, "port": self.store.port}
        lost = self.meeting.word.lost
        self.meeting.decide(Decision(attempt=number, members=tuple(members), plan=plan, lost=lost))
        return self.meeting.word

    def _gathered(self) -> list[int]:
        meeting, section, start = self.meeting, self.section, time.monotonic()
        enough_since, said = None, ""
        while True:
            there, now = meeting.present(), time.monotonic()
            if len(there) >= section.max_nodes:
                return there[: section.max_nodes]
            if (text := meeting.refused()) and not meeting.word.attempt:
                raise LaunchError(text)
            if len(there) >= section.min_nodes:
                enough_since = enough_since or now
                if now - enough_since > LATECOMERS_SECONDS:
                    return there
            else:
                self._wait_or_give_up(len(there), now - start)
            waits = f"{len(there)} of {section.max_nodes} machines are there"
            if waits != said and now - start > QUIET_SECONDS:
                sys.stderr.write(f"{waits}; waiting for more at {meeting.endpoint}\n")
                said = waits
            meeting.wait(lambda: False, seconds=0.2)

    def _wait_or_give_up(self, there: int, waited: float) -> None:
        needed = self.section.min_nodes
        if self.meeting.word.attempt and not self.section.REJOINS:
            raise PeerLost(
                f"{there} of {needed} machines are left, too few to go on (launch.nodes={self.section.nodes})"
            )
        if waited > self.section.join_timeout_seconds:
            text = f"only {there} of {needed} machines came together within {waited:.0f} s"
            if self.meeting.word.attempt:
                raise PeerLost(f"{text} after one was lost (launch.join_timeout_seconds)")
            raise LaunchError(
                f"{text} at {self.meeting.endpoint} (launch.join_timeout_seconds): run the same command with "
                f"--node-rank 1{f' to {needed - 1}' if needed > 2 else ''} on the others"
            )

    # ---- when it is over

    @staticmethod
    def look(meeting: Membership) -> None:
        """While a start runs: end it when it cannot go on, or when another machine has come."""
        word = meeting.word
        if word.over:
            return
        gone = [i for i in word.members if meeting.is_lost(i)]
        failed = [i for i in word.members if meeting.failed_for(i, word.attempt) > FAILED_SECONDS]
        new = [i for i in meeting.present() if i not in word.members]
        if gone:
            meeting.give_up(gone)
            meeting.decide(replace(meeting.word, over=f"{meeting.called(gone[0])} is lost", kindly=False))
        elif failed:
            meeting.decide(replace(word, over=f"processes of {meeting.called(failed[0])} have failed", kindly=False))
        elif new and len(word.members) < meeting.section.max_nodes:
            sys.stderr.write(f"{meeting.called(new[0])} has come: the run saves, and goes on with it\n")
            meeting.decide(replace(word, over=f"{meeting.called(new[0])} joins", kindly=True))

    # ---- whether there is another

    def judged(self, word: Decision, own: Failure | None) -> int | None:
        """Decide, when all nodes have ended a start -> the exit code of the run; None: there is another start."""
        self._wait_for_outcomes(word, has_failed=own is not None)
        failures = [own] if own else []
        for index in word.members[1:]:
            failures += self._outcome(index, word)
        if not failures:
            if not self.meeting.word.over:
                return self._end(0, "")
            self.before, self.is_again = saved(self.logs), False
            return None
        return self._after(min(failures, key=lambda failure: failure.weight), word)

    def _wait_for_outcomes(self, word: Decision, *, has_failed: bool) -> None:
        """Until everybody has said how the start ended, or is lost."""
        meeting, others = self.meeting, word.members[1:]

        def all_known() -> bool:
            return all(meeting.is_lost(i) or meeting.outcome(i, word.attempt) is not None for i in others)

        if has_failed and not meeting.wait(all_known, seconds=FAILED_SECONDS):
            meeting.decide(replace(meeting.word, over="processes of node 0 have failed", kindly=False))
        meeting.wait(all_known, seconds=self.section.grace_seconds + FAILED_SECONDS)

    def _outcome(self, index: int, word: Decision) -> list[Failure]:
        outcome = self.meeting.outcome(index, word.attempt)
        if outcome is not None:
            return [Failure(**outcome["failure"])] if outcome["failure"] else []
        silence = self.meeting.silence(index)
        self.meeting.give_up([index])
        return [lost(f"{self.meeting.called(index)} has given no sign of life for {silence:.0f} s")]

    def _after(self, failure: Failure, word: Decision) -> int | None:
        """Whether to start again after a failure, and how."""
        now = saved(self.logs)
        got_further = bool(set(now.items()) - set(self.before.items()))
        self.before, self.in_vain = now, 0 if got_further else self.in_vain + 1
        is_again_alike, self.alike = bool(failure.alike) and failure.alike == self.alike, failure.alike
        text = f"{failure.text}\n" if failure.text else ""
        if failure.is_final:
            return self._end(failure.exit_code, text)
        obstacle = AGAIN_ALIKE if is_again_alike else self._obstacle(failure, got_further=got_further)
        if obstacle:
            return self._end(failure.exit_code, text + self._farewell(word, obstacle))
        sys.stderr.write(text)
        self.restarts, self.is_again = self.restarts + 1, True
        processes = self._processes(word.members)
        if self.meeting.is_alone and self.in_vain > 1 and processes > self.section.min_processes:
            self.at_most = processes - 1
        return None

    def _obstacle(self, failure: Failure, *, got_further: bool) -> str | None:
        """Why the run is not started again, if so."""
        if not failure.was_killed and not got_further:
            return "It is not started again: with no checkpoint since, the same would happen at the same place."
        if self.restarts < self.section.max_restarts:
            return None
        if not self.section.max_restarts:
            return "It is not started again (launch.max_restarts=0)."
        return f"It is not started again after {self.restarts} restarts (launch.max_restarts)."

    def _end(self, code: int, text: str) -> int:
        sys.stderr.write(text)
        self.meeting.decide(replace(self.meeting.word, verdict={"code": code, "text": text}))
        return code

    def _farewell(self, word: Decision, why: str) -> str:
        lines = [*(["The other processes were ended too."] if self._processes(word.members) > 1 else []), why]
        if newest(self.logs):
            lines.append(f"Go on from {newest(self.logs)} with: lockstep train {self.logs.parent / 'recipe.yaml'}")
        return "\n".join(lines) + "\n"

    # ---- what there is

    def _processes(self, members: list[int] | tuple[int, ...]) -> int:
        total = sum(self.meeting.others[i]["processes"] for i in members)
        return min(total, self.at_most) if self.at_most else total

    def _on_machines(self, members: list[int]) -> str:
        return "" if self.meeting.is_alone else f" of {_count(len(members), 'machine')}"


def clear(logs: Path) -> None:
    """Before a start: keep the logs of the one before, and take away its last words."""
    for log in logs.glob("rank-*.log"):
        if log.name != "rank-0.log":  # which is continued
            log.replace(log.with_suffix(".log.before"))
    for last_word in [*logs.glob(".error-*.json"), *logs.glob(VERDICT)]:
        last_word.unlink()


def saved(logs: Path) -> dict[str, float]:
    """The checkpoints of the run with these logs -> when they were made. One that is written now has a longer name."""
    found = {}
    for file in (logs.parent / "checkpoints").glob("step-*/manifest.json"):
        with suppress(OSError):
            if file.parent.name[len("step-") :].isdecimal():
                found[file.parent.name] = file.stat().st_mtime
    return found


def newest(logs: Path) -> str | None:
    """The name of the newest of them."""
    return max(saved(logs), default=None)


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural if number > 1 else ''}"
