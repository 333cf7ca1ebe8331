"""The screen of `lockstep watch`: what matters most comes first, and stays where a terminal is narrow."""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping_console import escape_name
from lockstep.core.host.phases import BUSY
from lockstep.observe.report.timeline import TimelineEvent
from lockstep.observe.run_lines import HistoryLine, MetricLine
from lockstep.observe.sinks.progress import readable
from lockstep.observe.watch.run_state import RunState

MOST_RANKS = 8
"""Rows of ranks: the slowest ones."""
MOST_EVENTS = 6
WIDE = 100
"""Columns from which the table of ranks shows the time of each by phase."""
GB = 1e9
GPU_UNITS = {"utilization_percent": "%", "used_gigabytes": "GB", "watts": "W", "celsius": "°C"}
MOST_SECONDS = 1e10
"""Limit of a duration, which a timedelta can hold."""


def screen(state: RunState, *, width: int, now: float | None = None) -> RenderableType:
    """Render the whole screen; `now` in seconds since 1970."""
    now = time.time() if now is None else now
    if state.start is None:
        return Text(f"{escape_name(state.name)}: waiting for its first step", style="bold")
    parts: list[RenderableType] = [_headline(state, now), *_progress(state)]
    parts += [_wrap(line, width) for line in _figures(state)]
    if state.ranks is not None:
        parts += [Text(), _ranks(state.ranks, is_wide=width >= WIDE)]
    parts += [Text(), *(_timeline_line(each, now) for each in state.timeline_events[-MOST_EVENTS:])]
    parts += [Text(escape_name(note), style="yellow") for note in state.notes]
    return Group(*parts)


def _headline(state: RunState, now: float) -> Text:
    assert state.start is not None
    first = state.start.lines[0]
    processes = f"{first.world_size} process{'' if first.world_size == 1 else 'es'}"
    status = state.start.status or f"last line {_ago(now - state.start.ended)} ago"
    return Text.assemble((escape_name(state.name), "bold"), f" · {status} · {processes} · {escape_name(first.device)}")


def _progress(state: RunState) -> list[RenderableType]:
    """Render a bar, and beside it the step, the epoch and the remaining time."""
    assert state.start is not None
    first = state.start.lines[0]
    if not first.total_steps:
        return []
    text = f"step {state.step:,}/{first.total_steps:,}"
    if first.steps_per_epoch:
        text += f" · epoch {max(state.step - 1, 0) // first.steps_per_epoch + 1}"
    done = state.step - first.step
    if state.start.status is None and done:
        seconds = (state.start.ended - first.time) / done * (first.total_steps - state.step)
        text += f" · {_duration(seconds)} left"
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_row(text, ProgressBar(total=first.total_steps, completed=state.step))
    return [row]


def _figures(state: RunState) -> Iterable[Sequence[str]]:
    """Yield lines of the last figures: of the step, of the evaluation, of memory and saves."""
    if state.metrics:
        yield ["train", *_values(state.metrics)]
    if state.evaluation:
        yield [f"test after step {state.evaluation.step:,}", *_values(state.evaluation)]
    last = []
    if state.steps is not None and state.steps.memory_bytes:
        last.append(f"{state.steps.memory_bytes / GB:.2f} GB on rank 0")
    if state.saved is not None:
        last.append(f"checkpoint of step {state.saved.step:,} at {_clock(state.saved.time)}")
    if last:
        yield last


def _values(line: MetricLine) -> list[str]:
    return [readable({name: value}) for name, value in line.values.items() if value is not None]


def _wrap(texts: Sequence[str], width: int) -> Text:
    """Join the texts into lines that fit this width, none of them cut."""
    lines = [""]
    for text in texts:
        joined = f"{lines[-1]} · {text}" if lines[-1] else text
        if len(joined) > width and lines[-1]:
            lines.append(f"  {text}")
        else:
            lines[-1] = joined
    return Text("\n".join(lines))


def _ranks(line: HistoryLine, *, is_wide: bool) -> Table:
    """Tabulate the milliseconds of a step by rank, the slowest first."""
    steps = max(line.steps, 1)
    rows = []
    for place, rank in enumerate(line.ranks):
        each = {name: 1000 * values[place] / steps for name, values in line.phases.items() if place < len(values)}
        rows.append((sum(each.get(name, 0.0) for name in BUSY), rank, each, place))
    rows.sort(key=lambda row: (-row[0], row[1]))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    names = [*BUSY[:-1], "other"] if is_wide else []
    gpus = [(line.gpus[name], unit) for name, unit in GPU_UNITS.items() if name in line.gpus]
    for name in ("rank", "own ms/step", *names, "waits", "memory", *(["GPU"] if gpus else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for busy, rank, each, place in rows[:MOST_RANKS]:
        memory = f"{line.memory_by_rank[place] / GB:.2f} GB" if place < len(line.memory_by_rank) else ""
        figures = [f"{each.get(name, 0.0):.1f}" for name in (*names, "exchange")]
        gpu = [f"{values[place]:.0f} {unit}" for values, unit in gpus if place < len(values)]
        table.add_row(str(rank), f"{busy:.1f}", *figures, memory, *([", ".join(gpu)] if gpus else []))
    if len(rows) > MOST_RANKS:
        table.add_row("…", f"{len(rows) - MOST_RANKS} more")
    return table


def _timeline_line(each: TimelineEvent, now: float) -> Text:
    text = f"{_clock(each.time)} step {each.step:,}: {escape_name(each.text)}"
    return Text(text, style="yellow" if each.is_bad else "", overflow="fold")


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else _duration(seconds)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(min(max(seconds, 0.0), MOST_SECONDS))))
