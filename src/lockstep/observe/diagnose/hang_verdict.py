"""Diagnosis of the rank that keeps the others waiting: one sentence from the reports of all ranks."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, kw_only=True)
class Report:
    """Location of a rank's training thread."""

    rank: int
    process: int
    host: str
    step: int
    """The current step, from 1."""
    waits_in: str | None
    """The collective that it waits in; None where it is busy itself."""
    location: str
    """file:line `function`."""
    seconds: float
    """Seconds for which it has been there."""
    stacks: str
    """The stacks of all threads."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks as 'rank 3', 'ranks 0-2, 5'."""
    numbers = sorted(ranks)
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"


def verdict(reports: Sequence[Report], silent: Sequence[str] = ()) -> str:
    """Write one sentence: the ranks that are busy or silent, then where the others wait for them."""
    busy = [report for report in reports if report.waits_in is None]
    clauses = list(silent)
    by_location: dict[str, list[Report]] = defaultdict(list)
    for report in busy:
        by_location[report.location].append(report)
    for location, group in by_location.items():
        verb = "is" if len(group) == 1 else "are"
        seconds = min(report.seconds for report in group)
        clauses.append(f"{ranks_text(r.rank for r in group)} {verb} in {location} for {seconds:.0f} s")
    waiting: dict[tuple[str, int], list[int]] = defaultdict(list)
    for report in reports:
        if report.waits_in is not None:
            waiting[report.waits_in, report.step].append(report.rank)
    for (what, step), ranks in waiting.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        clauses.append(f"{ranks_text(ranks)} {verb} in {what} of step {step}")
    text = "; ".join(clauses)
    if not busy and not silent and len(waiting) > 1:
        return f"{text}: they wait for each other in different places, so none can go on"
    if not busy and not silent:
        return f"{text}: all are there, so the network or the device between them is stuck"
    return text
