"""history.jsonl: when things happened to a run, over all of its starts; unlike metrics.jsonl, lines are never dropped.

Each line has `time` (seconds since 1970) and `kind`: started, steps, ranks, evaluated, texts, saved, steered,
spiked, regrouped, warned or ended.
"""

import json
import os
import time
from contextlib import suppress
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

from lockstep.base import events, storage
from lockstep.core.host.memory_meter import device_peak_bytes
from lockstep.core.host.phases import BUSY
from lockstep.observe.run_folder import HISTORY_FILE
from lockstep.observe.run_lines import MOST_CHARACTERS

MOST_RANKS = 64
"""Limit of the ranks in a line; those with most to do are kept."""


class RunHistory(events.Observer):
    """Appends the lines of rank 0; a line that cannot be written, as on a full disk, is left out."""

    def __init__(self, folder: Path, *, began: float | None = None) -> None:
        """`began`: when the command of the run began, in seconds since 1970."""
        self.began = began or time.time()
        self.path = folder / HISTORY_FILE
        self.step = 0
        self.step_seconds = 0.0
        """Seconds in steps since the last line about them."""
        self.mark = time.monotonic()

    @singledispatchmethod
    def notice(self, event: object) -> None:
        """Ignore other events."""

    def go_on(self, step: int) -> None:
        """Write from this step on, in the place of another process that was lost."""
        self.step, self.mark = step, time.monotonic()
        self._end_line()

    @notice.register
    def _(self, event: events.RunStarted) -> None:
        if event.goes_on:
            return
        self.go_on(event.resumed_step)
        self._write(
            "started",
            event.resumed_step,
            world_size=event.world_size,
            device=event.device,
            total_steps=event.total_steps,
            steps_per_epoch=event.steps_per_epoch,
            seconds=round(max(time.time() - self.began, 0.0), 3),
        )

    @notice.register
    def _(self, event: events.StepDone) -> None:
        now = time.monotonic()
        self.step, self.step_seconds, self.mark = event.step, self.step_seconds + now - self.mark, now
        if event.values:
            self._write_steps()

    @notice.register
    def _(self, event: events.RankTimes) -> None:
        busy = [sum(seconds) for seconds in zip(*(event.seconds[name] for name in BUSY), strict=True)]
        kept = sorted(sorted(range(len(busy)), key=busy.__getitem__)[-MOST_RANKS:])
        self._write(
            "ranks",
            event.step,
            steps=event.steps,
            ranks=kept,
            phases={name: [round(values[rank], 5) for rank in kept] for name, values in event.seconds.items()},
            delayed_seconds=[round(event.delayed_seconds[rank], 5) for rank in kept],
            micro_batches=[event.micro_batches[rank] for rank in kept],
            memory_by_rank=[event.memory_bytes[rank] for rank in kept],
            gpus={name: [round(values[rank], 3) for rank in kept] for name, values in event.gpus.items()},
        )

    @notice.register
    def _(self, event: events.Evaluated) -> None:
        seconds, self.mark = time.monotonic() - self.mark, time.monotonic()
        self._write("evaluated", event.step, seconds=round(seconds, 3))

    @notice.register
    def _(self, event: events.TextsGenerated) -> None:
        self.mark = time.monotonic()
        self._write("texts", event.step, texts=[[sample.prompt, sample.text] for sample in event.samples])

    @notice.register
    def _(self, event: events.CheckpointSaved) -> None:
        self.step_seconds -= event.stall_seconds  # steps are timed from the end of one to the end of the next
        self._write("saved", event.step, seconds=round(event.seconds, 3), stall_seconds=round(event.stall_seconds, 4))

    @notice.register
    def _(self, event: events.Steered) -> None:
        self._write("steered", event.step, message=event.what)

    @notice.register
    def _(self, event: events.Spiked) -> None:
        self._write("spiked", event.step, message=event.text)

    @notice.register
    def _(self, event: events.Regrouped) -> None:
        self.mark = time.monotonic()  # the unfinished step is repeated
        message = event.text.replace("\n", "; ")[:MOST_CHARACTERS]
        self._write("regrouped", event.step, message=message, seconds=round(event.seconds, 3))

    @notice.register
    def _(self, event: events.Warned) -> None:
        self._write("warned", self.step, message=event.message[:MOST_CHARACTERS])

    @notice.register
    def _(self, event: events.RunEnded) -> None:
        self._write_steps()
        self._write("ended", self.step, status=event.status)

    def _end_line(self) -> None:
        """End a line that a kill has cut short."""
        with suppress(OSError):
            with storage.regular(self.path) as file:
                file.seek(-1, os.SEEK_END)
                is_cut = file.read(1) != b"\n"
            if is_cut:
                with storage.append(self.path) as appended:
                    appended.write("\n")

    def _write_steps(self) -> None:
        """Write the seconds in steps since the last such line."""
        seconds, self.step_seconds = max(0.0, self.step_seconds), 0.0  # the last save comes after the last step
        self._write("steps", self.step, seconds=round(seconds, 4), memory_bytes=device_peak_bytes())

    def _write(self, kind: str, step: int, **values: Any) -> None:
        line = {"time": round(time.time(), 3), "kind": kind, "step": step, **values}
        with suppress(OSError), storage.append(self.path) as file:
            file.write(json.dumps(line) + "\n")
