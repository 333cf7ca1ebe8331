"""How far it is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_SECONDS = 5.0
"""Lines come at most this often."""
SPEED_SECONDS = 60.0
"""The bar's speed is one of the last minute."""


class Count:
    """Rows that are predicted, of which `before` were when this command began."""

    def __init__(self, total: int, before: int) -> None:
        self.total, self.before, self.done = total, before, before
        self.began = time.monotonic()

    def add(self, rows: int) -> None:
        self.done += rows

    @property
    def speed(self) -> float:
        """Rows a second, of this command."""
        return (self.done - self.before) / max(time.monotonic() - self.began, 1e-9)


class PredictionLines(Count):
    def __init__(self, total: int, before: int, console: Console) -> None:
        super().__init__(total, before)
        self.console, self.last = console, self.began

    def add(self, rows: int) -> None:
        """So many more, which is worth a line when the last is some time ago."""
        super().add(rows)
        now = time.monotonic()
        if now - self.last >= QUIET_SECONDS and self.speed > 0:
            self.last = now
            left = timedelta(seconds=round((self.total - self.done) / self.speed))
            self.console.print(f"{self.done:,} of {self.total:,} rows · {self.speed:,.0f} rows/s · {left} left")


class PredictionBar(Count):
    def __init__(self, total: int, before: int, progress: Progress) -> None:
        super().__init__(total, before)
        self.progress = progress
        self.task = progress.add_task("predicting", total=total, completed=before, speed="")

    def add(self, rows: int) -> None:
        super().add(rows)
        self.progress.update(self.task, completed=self.done, speed=f"{self.speed:,.0f} rows/s")


@contextmanager
def shown(console: Console, *, total: int, before: int) -> Iterator[Count]:
    """What suits the console, until it is over."""
    if not console.is_terminal:
        yield PredictionLines(total, before, console)
        return
    columns = ("{task.description}", BarColumn(), "{task.completed:,}/{task.total:,}", "{task.fields[speed]}")
    shown = [TextColumn(column) if isinstance(column, str) else column for column in columns]
    with Progress(
        *shown,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=SPEED_SECONDS,
    ) as progress:
        yield PredictionBar(total, before, progress)
