"""Progress of a task with known length: a bar on a terminal, a line every few seconds elsewhere."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

QUIET_SECONDS = 5.0
"""Least time between two lines."""
WIDE = 110
"""Characters from which a bar and what is beside it fit into one line."""
NARROW_BAR = 12
SPEED_SECONDS = 60.0
"""The remaining time on a bar follows from the speed of the last minute."""


class FittingProgress(Progress):
    """Bars with count and remaining time; the field `figures` of a task is beside it, or below on narrow terminals."""

    def __init__(self, console: Console) -> None:
        self.screen = console  # the base class looks at the bars before it has its own `console`
        super().__init__(console=console, speed_estimate_period=SPEED_SECONDS)

    @property
    def is_narrow(self) -> bool:
        return self.screen.width < WIDE

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield a table of bars, and lines below it."""
        yield self.make_tasks_table(self.tasks)
        if self.is_narrow:
            for task in self.tasks:
                if task.visible and task.fields["figures"]:
                    yield Text(task.fields["figures"], overflow="fold")

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        texts = ["{task.description}", "{task.completed:,}/{task.total:,}", "{task.fields[figures]}"]
        name, count, figures = (TextColumn(text, markup=False) for text in texts)
        left = (TimeRemainingColumn(), TextColumn("left"))
        if self.is_narrow:
            self.columns = name, BarColumn(NARROW_BAR), count, *left
        else:
            self.columns = name, BarColumn(), count, figures, TimeElapsedColumn(), *left
        return super().make_tasks_table(tasks)


class Pace:
    """Remaining time of a task, and whether its next line is due."""

    def __init__(
        self, total: int, done_before: int, quiet_seconds: float = QUIET_SECONDS, *, is_quiet: bool = False
    ) -> None:
        """`is_quiet`: whether the first line comes after `quiet_seconds`, too."""
        self.total, self.done_before, self.quiet_seconds = total, done_before, quiet_seconds
        self.start = time.monotonic()
        self.last_line = self.start if is_quiet else -math.inf

    def time_left(self, done: int) -> str:
        seconds = (self.total - done) * (time.monotonic() - self.start) / max(done - self.done_before, 1)
        return f"{timedelta(seconds=round(seconds))} left"

    def is_due(self) -> bool:
        """Return whether the last line is long enough ago; if so, this call counts as a line."""
        now = time.monotonic()
        if now - self.last_line < self.quiet_seconds:
            return False
        self.last_line = now
        return True


class UnitCounter:
    """Counts what is done of a task and shows it, on a bar if there is one."""

    def __init__(self, console: Console, unit: str, *, total: int, done: int, bar: Progress | None) -> None:
        self.console, self.unit, self.done = console, unit, done
        self.bar, self.pace = bar, Pace(total, done, is_quiet=True)

    def add(self, number: int) -> None:
        self.done += number
        speed = f"{self.speed:,.{0 if self.speed >= 10 else 1}f} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done, figures=speed)
        elif self.pace.is_due():
            count = f"{self.done:,} of {self.pace.total:,} {self.unit}"
            self.console.print(f"{count} · {speed} · {self.pace.time_left(self.done)}")

    @property
    def speed(self) -> float:
        """Units per second since the start."""
        return (self.done - self.pace.done_before) / max(time.monotonic() - self.pace.start, 1e-9)


@contextmanager
def counting(console: Console, what: str, unit: str, *, total: int, done: int) -> Iterator[UnitCounter]:
    """Provide a counter of a task, of which `done` units were done before."""
    if not console.is_terminal:
        yield UnitCounter(console, unit, total=total, done=done, bar=None)
        return
    with FittingProgress(console) as bar:
        bar.add_task(what, total=total, completed=done, figures="")
        yield UnitCounter(console, unit, total=total, done=done, bar=bar)
