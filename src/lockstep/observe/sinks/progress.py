"""Output of a run for the user: a bar on a terminal, plain lines elsewhere, and always logs/rank-0.log."""

from collections.abc import Mapping
from datetime import timedelta
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import TaskID

from lockstep.base import events, storage
from lockstep.base.errors import ConfigError, printable
from lockstep.base.escaping_console import EscapingConsole, escape_name
from lockstep.observe.progress_bar import QUIET_SECONDS, FittingProgress, Pace

EVALUATION = "evaluating"
MOST_SHOWN, PROMPT_SHOWN = 160, 60
"""Length limit of a generated text."""


class ProgressLines(events.Observer):
    """Prints a line for each event of interest; for steps at most every `quiet_seconds`."""

    def __init__(self, console: Console, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.console, self.quiet_seconds = console, quiet_seconds
        self.pace: Pace | None = None
        self.paces: dict[str | int, Pace] = {}
        """Name of a preparation, or step of an evaluation -> its pace."""

    @singledispatchmethod
    def notice(self, event: object) -> None:
        """Ignore other events."""

    def print(self, text: str, style: str | None = None) -> None:
        """Print one line without wrapping or interpreting it."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, task: str | int) -> bool:
        """Return whether the next line of a preparation or evaluation is due; the first comes after QUIET_SECONDS."""
        return self.paces.setdefault(task, Pace(0, 0, is_quiet=True)).is_due()

    @notice.register
    def _(self, event: events.Preparing) -> None:
        if event.done >= event.total:
            self.print(f"{event.what}: {event.done:,} done")
        elif self._is_due(event.what):
            self.print(f"{event.what}: {event.done:,} of {event.total:,}")

    @notice.register
    def _(self, event: events.RunStarted) -> None:
        self.pace = Pace(event.total_steps, event.resumed_step, self.quiet_seconds)
        for line in () if event.goes_on else start_lines(event):
            self.print(line)

    @notice.register
    def _(self, event: events.StepDone) -> None:
        if not event.values or self.pace is None:
            return
        is_last = event.step == self.pace.total
        if is_last or self.pace.is_due():
            line = f"step {event.step}/{self.pace.total} · epoch {event.epoch} · {readable(event.values)}"
            self.print(line if is_last else f"{line} · {self.pace.time_left(event.step)}")

    @notice.register
    def _(self, event: events.Evaluating) -> None:
        if event.done < event.total and self._is_due(event.step):
            self.print(f"evaluating after step {event.step}: {event.done:,} of {event.total:,} micro-batches")

    @notice.register
    def _(self, event: events.Evaluated) -> None:
        self.print(f"test after step {event.step} ({event.samples:,} samples): {readable(event.values)}", "bold")

    @notice.register
    def _(self, event: events.TextsGenerated) -> None:
        for sample in event.samples[:1]:
            is_long = len(sample.prompt) > PROMPT_SHOWN
            prompt = f"... {sample.prompt[-PROMPT_SHOWN:]}" if is_long else sample.prompt
            text = escape_name(" ".join(f"{prompt}|{sample.text}".split()))
            self.print(f"after step {event.step} it writes: {text[:MOST_SHOWN]}", "dim")

    @notice.register
    def _(self, event: events.CheckpointSaved) -> None:
        stall = f"training stood still for {event.stall_seconds * 1000:.0f} ms"
        self.print(f"checkpoint {escape_name(event.folder.name)} saved in {event.seconds:.2f} s, {stall}", "dim")

    @notice.register
    def _(self, event: events.Steered) -> None:
        self.print(f"after step {event.step}, as an observer has asked: {event.what}")

    @notice.register
    def _(self, event: events.Spiked) -> None:
        self.print(f"step {event.step}: {event.text}", "yellow")

    @notice.register
    def _(self, event: events.Regrouped) -> None:
        for line in event.text.splitlines():
            self.print(line, "yellow" if event.losses else None)

    @notice.register
    def _(self, event: events.Warned) -> None:
        self.print(f"warning: {event.message}", "yellow")

    @notice.register
    def _(self, event: events.RunEnded) -> None:
        for line in end_lines(event):
            self.print(line)


class LogLines(ProgressLines):
    """Writes every line to a file; without rich, which takes half a millisecond for each."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(EscapingConsole(file=file), quiet_seconds=0)

    def print(self, text: str, style: str | None = None) -> None:
        self.console.file.write(f"{printable(text)}\n")


class ProgressBar(ProgressLines):
    """Prints the same lines above bars for preparation and for training."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.progress = FittingProgress(console)
        self.tasks: dict[str, TaskID] = {}

    def close(self) -> None:
        """Stop drawing and show the cursor again."""
        self.progress.stop()

    def notice(self, event: object) -> None:
        """Move a bar for steps and preparation; print the rest above it."""
        if isinstance(event, events.Preparing):
            self._move(event.what, event.total, completed=event.done)
            return
        if isinstance(event, events.StepDone):
            if self.pace is not None:
                short = {name: value for name, value in event.values.items() if name not in SHORT or name == SPEED}
                figures = {"figures": readable(short)} if short else {}
                description = f"epoch {event.epoch}"
                self._move("training", self.pace.total, completed=event.step, description=description, **figures)
            return
        if isinstance(event, events.Evaluating):
            self._move(EVALUATION, event.total, completed=event.done, visible=event.done < event.total)
            return
        if isinstance(event, events.RunEnded):
            self.progress.stop()
        super().notice(event)
        if isinstance(event, events.RunStarted):
            self._move("training", event.total_steps, completed=event.resumed_step)

    def _move(self, name: str, total: int, **fields: Any) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=total, figures="")
            self.progress.start()
        self.progress.update(self.tasks[name], **fields)


def terminal() -> ProgressLines:
    """Create an observer for the terminal alone: a bar if it is one, else lines."""
    console = EscapingConsole()
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


class ProgressSink:
    """Reports to the terminal, and in plain lines to logs/rank-0.log."""

    def __init__(self, folder: Path) -> None:
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            self.file = storage.append(logs / "rank-0.log")
        except OSError as error:
            text = f"{logs / 'rank-0.log'} cannot be written: {error.strerror}; remove it"
            raise ConfigError(storage.full_disk(error) or text) from None
        self.outputs: list[ProgressLines] = [terminal(), LogLines(self.file)]

    def notice(self, event: object) -> None:
        for output in self.outputs:
            output.notice(event)

    def close(self) -> None:
        for output in self.outputs:
            output.close()
        self.file.close()


SPEED, TOKENS, UTILIZATION = "samples_per_second", "tokens_per_second", "mfu"
SHORT = {"learning_rate": "lr", "gradient_norm": "grad norm", "samples_per_second": "samples/s", TOKENS: "tokens/s"}


def readable(values: Mapping[str, float]) -> str:
    """Format values in the given order, short: 'loss 0.0312 · accuracy 0.9912 · 5,312 samples/s'."""
    texts = []
    for name, value in values.items():
        if name in (SPEED, TOKENS):
            texts.append(f"{value:,.0f} {SHORT[name]}")
        elif name == UTILIZATION:
            texts.append(f"{value:.1%} MFU")
        elif name == "learning_rate":
            texts.append(f"lr {value:.3g}")
        else:
            texts.append(f"{escape_name(SHORT.get(name, name))} {value:.4f}")
    return " · ".join(texts)


def start_lines(event: events.RunStarted) -> list[str]:
    processes = f"{event.world_size} process{'es' if event.world_size > 1 else ''}"
    lines = [
        f"run {escape_name(event.name)}: {event.parameters:,} parameters, {event.train_samples:,} training samples, "
        f"{event.total_steps:,} steps ({event.steps_per_epoch:,} per epoch) on {processes}, {event.device}"
    ]
    if event.resumed_step:
        lines.append(f"resumed after step {event.resumed_step}")
    return lines + [f"note: {note}" for note in event.notes]


def end_lines(event: events.RunEnded) -> list[str]:
    summary = event.summary
    if event.status == "failed":
        return [f"failed after {summary['steps']:,} steps"]
    took = f" in {timedelta(seconds=round(summary['seconds']))}" if "seconds" in summary else ""
    lines = [f"{event.status} after {summary['steps']:,} steps{took} · digest {summary['digest'][:16]}"]
    evaluation, best = summary["evaluation"], summary.get("best")
    if best is not None:
        evaluation, value = best["evaluation"], {best["metric"]: best["value"]}
        lines.append(f"best checkpoint, which export takes: step {best['step']:,} · {readable(value)}")
    if evaluation:
        lines.append(f"test: {readable(evaluation)}")
    return [*lines, f"everything is in {escape_name(summary['folder'])}"]


build = ProgressSink
