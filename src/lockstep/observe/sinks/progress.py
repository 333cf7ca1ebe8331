"""What a person sees: a bar on a terminal, plain lines elsewhere, and always logs/rank-0.log."""

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import singledispatchmethod
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.base.escaping import EscapingConsole, escape_name
from lockstep.base.events import CheckpointSaved, Evaluated, Preparing, RunEnded, RunStarted, StepDone, Warned

QUIET_SECONDS = 5.0
"""Plain lines for steps come at most this often."""


class ProgressLines:
    """One line per event that matters, with the time left."""

    def __init__(self, console: Console, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.console, self.quiet_seconds = console, quiet_seconds
        self.total_steps, self.last, self.began = 0, 0.0, (0, time.monotonic())

    def close(self) -> None:
        """Nothing is kept open."""

    @singledispatchmethod
    def notice(self, event: object) -> None:
        """Other events are not for people."""

    def say(self, text: str, style: str | None = None) -> None:
        """Print one line, as it is."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    @notice.register
    def _(self, event: Preparing) -> None:
        if event.done >= event.total:
            self.say(f"{event.what}: {event.done:,} done")

    @notice.register
    def _(self, event: RunStarted) -> None:
        self.total_steps, self.began = event.total_steps, (event.resumed_step, time.monotonic())
        for line in opening(event):
            self.say(line)

    @notice.register
    def _(self, event: StepDone) -> None:
        now = time.monotonic()
        is_last = event.step == self.total_steps
        if event.values and (is_last or now - self.last >= self.quiet_seconds):
            self.last = now
            left = (self.total_steps - event.step) * (now - self.began[1]) / max(event.step - self.began[0], 1)
            time_left = f" · {timedelta(seconds=round(left))} left" if not is_last else ""
            self.say(
                f"step {event.step}/{self.total_steps} · epoch {event.epoch} · {readable(event.values)}{time_left}"
            )

    @notice.register
    def _(self, event: Evaluated) -> None:
        self.say(f"test after step {event.step} ({event.samples:,} samples): {readable(event.values)}", "bold")

    @notice.register
    def _(self, event: CheckpointSaved) -> None:
        stall = f"training stood still for {event.stall_seconds * 1000:.0f} ms"
        self.say(f"checkpoint {escape_name(event.folder.name)} saved in {event.seconds:.2f} s, {stall}", "dim")

    @notice.register
    def _(self, event: Warned) -> None:
        self.say(f"warning: {event.message}", "yellow")

    @notice.register
    def _(self, event: RunEnded) -> None:
        for line in closing(event):
            self.say(line)


class ProgressBar(ProgressLines):
    """The same lines, above a bar that moves with every step."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            "{task.description}",
            BarColumn(),
            "{task.completed}/{task.total}",
            "{task.fields[values]}",
        )
        shown = [TextColumn(c, markup=False) if isinstance(c, str) else c for c in columns]
        self.progress = Progress(
            *shown, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console
        )
        self.task: TaskID | None = None
        self.preparing: dict[str, TaskID] = {}

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.stop()

    def notice(self, event: object) -> None:
        """Steps and preparation move a bar; the rest is printed above it."""
        if isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, Preparing):
            self._prepare(event)
        else:
            if isinstance(event, RunEnded):
                self.progress.stop()
            super().notice(event)
        if isinstance(event, RunStarted):
            self.task = self.progress.add_task("training", total=event.total_steps, values="")
            self.progress.update(self.task, completed=event.resumed_step)
            self.progress.start()

    def _step(self, event: StepDone) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=event.step, description=f"epoch {event.epoch}")
            if event.values:
                short = {name: value for name, value in event.values.items() if name not in SHORT or name == SPEED}
                self.progress.update(self.task, values=readable(short))

    def _prepare(self, event: Preparing) -> None:
        if event.what not in self.preparing:
            self.preparing[event.what] = self.progress.add_task(event.what, total=event.total, values="")
            self.progress.start()
        self.progress.update(self.preparing[event.what], completed=event.done)


def terminal() -> ProgressLines:
    """For the terminal alone: a bar where it is one, lines where it is not."""
    console = EscapingConsole()
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


class Both:
    """The terminal, and the same in plain lines in logs/rank-0.log."""

    def __init__(self, folder: Path) -> None:
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            self.file = storage.append(logs / "rank-0.log")
        except OSError as error:
            raise ConfigError(f"{logs / 'rank-0.log'} cannot be written: {error.strerror}; remove it") from None
        log = EscapingConsole(file=self.file, width=200, color_system=None)
        self.parts: list[ProgressLines] = [terminal(), ProgressLines(log, 0.0)]

    def notice(self, event: object) -> None:
        for part in self.parts:
            part.notice(event)

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self.file.close()


SPEED = "samples_per_second"
SHORT = {"learning_rate": "lr", "gradient_norm": "grad norm", "samples_per_second": "samples/s"}


def readable(values: Mapping[str, float]) -> str:
    """Values in the order given, short: 'loss 0.0312 · accuracy 0.9912 · 5,312 samples/s'."""
    parts = []
    for name, value in values.items():
        if name == SPEED:
            parts.append(f"{value:,.0f} samples/s")
        elif name == "learning_rate":
            parts.append(f"lr {value:.3g}")
        else:
            parts.append(f"{escape_name(SHORT.get(name, name))} {value:.4f}")
    return " · ".join(parts)


def opening(event: RunStarted) -> list[str]:
    """What a run says before its first step."""
    processes = f"{event.world_size} process{'es' if event.world_size > 1 else ''}"
    lines = [
        f"run {escape_name(event.name)}: {event.parameters:,} parameters, {event.train_samples:,} training samples, "
        f"{event.total_steps:,} steps ({event.steps_per_epoch:,} per epoch) on {processes}, {event.device}"
    ]
    if event.resumed_step:
        lines.append(f"resumed after step {event.resumed_step}")
    return lines + [f"note: {note}" for note in event.notes]


def closing(event: RunEnded) -> list[str]:
    """What a run says at its end."""
    summary = event.summary
    if event.status == "failed":
        return [f"failed after {summary['steps']:,} steps"]
    lines = [f"{event.status} after {summary['steps']:,} steps · digest {summary['digest'][:16]}"]
    if summary["evaluation"]:
        lines.append(f"test: {readable(summary['evaluation'])}")
    return [*lines, f"everything is in {escape_name(summary['folder'])}"]


def build(folder: Path) -> Both:
    """The sink for a run directory."""
    return Both(folder)
