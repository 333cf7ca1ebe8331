"""Timeline of a run: starts, kills, changes of size, saves, evaluations, warnings, hangs, ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.observe.report.goodput import Start
from lockstep.observe.run_lines import HistoryLine

MOST_OF_A_KIND = 40
"""Saves, and evaluations, that are listed: the first and the last ones."""
MOST = 1000
"""Limit of all lines: the first and the last ones are listed."""


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One line of the timeline."""

    time: float
    """Seconds since 1970."""
    step: int
    text: str
    is_mark: bool = False
    """Whether it is drawn in the curves as well."""
    is_bad: bool = False


def timeline(starts: Sequence[Start], *, is_running: bool) -> list[TimelineEvent]:
    """List the lines. `is_running`: the last start may still go on, so that a missing end means nothing."""
    found: list[TimelineEvent] = []
    for number, start in enumerate(starts):
        if MOST <= number < len(starts) - MOST:  # is left out below
            continue
        found.append(_describe_start(start, starts[number - 1] if number else None))
        found += filter(None, map(_describe_line, start.lines[1:]))
        is_last = number + 1 == len(starts)
        if start.status is None and not (is_last and is_running):
            found.append(_describe_kill(start, None if is_last else starts[number + 1]))
    return _shorten(found)


def _describe_start(start: Start, before: Start | None) -> TimelineEvent:
    processes = f"{start.world_size} process{'' if start.world_size == 1 else 'es'}"
    device = start.lines[0].device
    if before is None and not start.first_step:
        text = f"started on {processes} ({device})"
    else:
        text = f"resumed at step {start.first_step:,} on {processes} ({device})"
        if before is not None and before.world_size != start.world_size:
            text += f"; before, there were {before.world_size}"
    return TimelineEvent(time=start.began, step=start.first_step, text=text, is_mark=before is not None)


def _describe_kill(start: Start, after: Start | None) -> TimelineEvent:
    step = start.lines[-1].step
    text = f"ended without a word after step {step:,}: killed, or its machine was lost"
    if after is not None and after.first_step < step:
        text += f"; steps {after.first_step + 1:,} to {step:,} were done again"
    return TimelineEvent(time=start.ended, step=step, text=text, is_mark=True, is_bad=True)


def _describe_line(line: HistoryLine) -> TimelineEvent | None:
    is_mark = line.kind == "spiked"
    is_bad = is_mark or line.kind == "warned" or line.status == "failed"
    stall = f"training stood still for {1000 * line.stall_seconds:.0f} ms"
    texts = {
        "saved": f"checkpoint saved in {line.seconds:.2f} s; {stall}",
        "evaluated": f"evaluated in {line.seconds:.1f} s",
        "steered": f"asked for by an observer: {line.message}",
        "spiked": line.message,
        "regrouped": line.message,
        "warned": f"warning: {line.message}",
        "ended": line.status,
    }
    text = texts.get(line.kind)
    if text is None:
        return None
    return TimelineEvent(time=line.time, step=line.step, text=text, is_mark=is_mark, is_bad=is_bad)


def _shorten(found: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Leave out the middle of a long row of saves or evaluations, or of a very long timeline."""
    left_out: set[int] = set()
    for word in ("checkpoint saved", "evaluated"):
        numbers = [number for number, each in enumerate(found) if each.text.startswith(word)]
        left_out |= {*numbers[MOST_OF_A_KIND // 2 : -MOST_OF_A_KIND // 2]}
    kept = [each for number, each in enumerate(found) if number not in left_out]
    if len(kept) <= MOST:
        return kept
    gap = replace(kept[MOST // 2], text="from here on, until the next line, what happened is left out")
    return [*kept[: MOST // 2], gap, *kept[-MOST // 2 :]]
