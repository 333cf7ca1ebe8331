"""metrics.jsonl: a line per logged step, evaluation and spike, as strict JSON."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pydantic_core

from lockstep.base import storage
from lockstep.base.events import Evaluated, Observer, RunStarted, Spiked, StepDone
from lockstep.observe.run_folder import METRICS
from lockstep.observe.run_lines import SPIKE, opened, short_lines


class Jsonl(Observer):
    """Appends lines; on resume, lines of steps that are repeated are dropped first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.waiting = ""
        """Lines that could not be written because the disk was full; they go before the next one."""

    def notice(self, event: object) -> None:
        if isinstance(event, RunStarted):
            self._drop_after(event.resumed_step)
        elif isinstance(event, StepDone) and event.values:
            self._write(
                {"kind": "step", "step": event.step, "epoch": event.epoch, **event.values, "chain": event.chain}
            )
        elif isinstance(event, Spiked):
            before = {f"{name}_before": old for name, (_, old) in event.values.items()}
            self._write({"kind": SPIKE, "step": event.step, **{n: v for n, (v, _) in event.values.items()}, **before})
        elif isinstance(event, Evaluated):
            facts = {"kind": "evaluation", "step": event.step, "epoch": event.epoch, "samples": event.samples}
            self._write({**facts, **{name: value for name, value in event.values.items() if name not in facts}})

    def _write(self, line: dict[str, Any]) -> None:
        strict = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self.waiting += json.dumps(strict, allow_nan=False) + "\n"
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with storage.append(self.path) as file:
                file.write(self.waiting)
            self.waiting = ""
        except OSError:  # failed saves are reported elsewhere; an incomplete line must not stay
            with suppress(OSError):
                os.truncate(self.path, before)

    def _drop_after(self, step: int) -> None:
        if not self.path.exists():
            return
        with opened(self.path) as file:
            kept = [line.rstrip(b"\n") for line in short_lines(file) if _step_of(line) <= step]
        storage.write(self.path, b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinite for one that a kill has cut short, so that it is dropped."""
    try:
        return float(pydantic_core.from_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return float("inf")


build = Jsonl
