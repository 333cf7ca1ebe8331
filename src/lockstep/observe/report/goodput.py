"""Goodput of a run: its time by purpose, over all of its starts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lockstep.observe.run_lines import HistoryLine


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Lines of a run from one start of the processes to their end."""

    lines: tuple[HistoryLine, ...]
    began: float
    """Start of the command, or of training after a restart by the same command: seconds since 1970."""

    @property
    def ended(self) -> float:
        """Time of its last line, seconds since 1970."""
        return self.lines[-1].time

    @property
    def status(self) -> str | None:
        """How it ended; None where it wrote nothing about it: killed, or still running."""
        return next((line.status for line in self.lines if line.kind == "ended"), None)

    @property
    def first_step(self) -> int:
        return self.lines[0].step

    @property
    def world_size(self) -> int:
        return self.lines[0].world_size

    def seconds_in_steps(self, until: float) -> float:
        """Return the time spent in steps up to a step, in proportion where it is between two logged ones."""
        total, before = 0.0, self.first_step
        for line in self.lines:
            if line.kind == "steps":
                share = 1.0 if line.step <= until else max(0.0, (until - before) / max(line.step - before, 1))
                total, before = total + share * line.seconds, line.step
        return max(total, 0.0)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds by what they were spent on; they add up to `wall`."""

    wall: float
    """Time from the first command's start to the last line of the run."""
    steps: float
    """Time in steps whose result is part of the run."""
    repeated: float
    """Time in steps that a kill undid, and that were done again."""
    evaluations: float
    saves: float
    """Time for which training stood still for them."""
    recoveries: float
    """Time until the others went on after a loss, and until a process has joined, with live recovery."""
    down: float
    """Time between the last line of one start and the next start."""

    @property
    def rest(self) -> float:
        """Building, importing, resuming."""
        known = self.steps + self.repeated + self.evaluations + self.saves + self.recoveries + self.down
        return max(self.wall - known, 0.0)

    @property
    def share(self) -> float:
        """Time in steps that count, as a fraction of all."""
        return min(self.steps / self.wall, 1.0) if self.wall else 0.0


def starts(history: Sequence[HistoryLine]) -> list[Start]:
    """List the starts of a run. One at step 0 after an orderly end is a new run in the folder, and replaces the old."""
    found: list[list[HistoryLine]] = []
    for line in history:
        if line.kind == "started":
            if line.step == 0 and found and any(each.kind == "ended" for each in found[-1]):
                found = []
            found.append([line])
        elif found:
            found[-1].append(line)
    all_starts = list[Start]()
    for each in found:
        command = max(each[0].time - each[0].seconds, 0.0)  # no clock was before 1970
        is_restart = bool(all_starts) and command < all_starts[-1].ended
        all_starts.append(Start(lines=tuple(each), began=each[0].time if is_restart else command))
    return all_starts


def goodput(runs: Sequence[Start]) -> Goodput | None:
    """Add up the seconds of all starts; None where the run has no history."""
    if not runs:
        return None
    nexts = (each.first_step for each in reversed(runs[1:]))
    limits = [*accumulate(nexts, min, initial=math.inf)][::-1]  # a later start may go further back
    steps = sum(each.seconds_in_steps(limit) for each, limit in zip(runs, limits, strict=True))
    everything = sum(each.seconds_in_steps(math.inf) for each in runs)
    return Goodput(
        wall=max(runs[-1].ended - runs[0].began, 0.0),
        steps=steps,
        repeated=everything - steps,
        evaluations=sum(line.seconds for each in runs for line in each.lines if line.kind == "evaluated"),
        saves=sum(line.stall_seconds for each in runs for line in each.lines),
        recoveries=sum(line.seconds for each in runs for line in each.lines if line.kind == "regrouped"),
        down=sum(max(after.began - before.ended, 0.0) for before, after in zip(runs, runs[1:], strict=False)),
    )
