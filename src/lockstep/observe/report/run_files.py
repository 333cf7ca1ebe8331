"""The parts of a run's folder that a report shows: settings, curves, history, summary, evaluation."""

import math
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from lockstep.base.errors import ConfigError
from lockstep.observe.run_folder import METRICS, RunFolder, RunSummary, flattened
from lockstep.observe.run_lines import HistoryLine

EVALUATION = "evaluation.json"
MOST_KEPT_POINTS = 32_000
"""Limit of a curve's points while it is read; beyond it, three of four are left out."""
MOST_CURVES, MOST_NAME = 200, 200
TEST = "test"


class WorstSample(BaseModel):
    """A sample with a high loss."""

    origin: str
    label: str
    predicted: str
    confidence: float | None
    loss: float
    text: str = ""
    image: Annotated[str, Field(pattern="^(data:image/|$)")] = ""
    """A data URI, never an address."""


class StoredEvaluation(BaseModel):
    """Fields of evaluation.json that a report shows."""

    worst: list[WorstSample] = Field([], max_length=1000)


@dataclass(frozen=True, kw_only=True)
class LoggedCurve:
    """Values of one quantity by step."""

    steps: list[int]
    values: list[float | None]
    """Values by step; None for one that was not finite."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """One run as its folder shows it."""

    name: str
    folder: Path
    settings: dict[str, Any]
    """Settings by "section.key"."""
    curves: dict[str, LoggedCurve]
    history: list[HistoryLine]
    summary: RunSummary
    evaluation: StoredEvaluation
    notes: list[str]
    """Sentences on what could not be read."""


def read(folder: Path) -> RunFiles:
    """Read the files of a run. Raises ConfigError for a folder that is no run's."""
    run = RunFolder(folder)
    run.settings_file()
    return RunFiles(
        name=folder.name,
        folder=folder,
        settings=dict(flattened(run.shown_settings())),
        curves=curves(run),
        history=run.history(),
        summary=run.summary(),
        evaluation=run.model_of(StoredEvaluation, EVALUATION),
        notes=run.notes,
    )


def with_parent(folder: Path) -> list[RunFiles]:
    """Read the files of a run and, where it is at hand, of the one that it was forked from. Raises ConfigError."""
    run = read(folder)
    parent = Path(str(run.settings.get("run.parent"))).parent.parent
    with suppress(ConfigError):
        if parent.name and str((run.summary.parent or {}).get("run")) == str(parent):
            return [run, read(parent)]
    return [run]


def curves(run: RunFolder) -> dict[str, LoggedCurve]:
    """Read metrics.jsonl: name -> curve of the values; those of evaluations are called "test ..."."""
    found: dict[str, LoggedCurve] = {}
    left_out = 0
    for line in run.metric_lines():
        prefix = f"{TEST} " if line.kind == "evaluation" else ""
        for short, value in line.values.items():
            name = f"{prefix}{short}"
            if name not in found and (len(found) == MOST_CURVES or len(name) > MOST_NAME):
                left_out += 1
                continue
            curve = found.setdefault(name, LoggedCurve(steps=[], values=[]))
            curve.steps.append(line.step)
            curve.values.append(value)
            if len(curve.steps) > MOST_KEPT_POINTS:
                found[name] = shortened(curve, MOST_KEPT_POINTS // 4)
    if left_out:
        run.notes.append(
            f"{left_out:,} values of {METRICS} left out: a report has {MOST_CURVES} curves with short names"
        )
    return {name: _sort_by_step(curve) for name, curve in found.items()}


def _sort_by_step(curve: LoggedCurve) -> LoggedCurve:
    """Sort a curve by step, each step once with its last value."""
    values = dict(sorted(zip(curve.steps, curve.values, strict=True), key=itemgetter(0)))
    return LoggedCurve(steps=list(values), values=list(values.values()))


def shortened(curve: LoggedCurve, most: int) -> LoggedCurve:
    """Reduce a curve to so many points: the ends, and of each bucket of neighbours the lowest and the highest."""
    count = len(curve.steps)
    if count <= most:
        return curve
    kept, buckets = {0, count - 1}, most // 2 - 1
    lows, highs = ([sign * math.inf if value is None else value for value in curve.values] for sign in (1, -1))
    for number in range(buckets):
        bucket = range(number * count // buckets, (number + 1) * count // buckets)
        kept |= {min(bucket, key=lows.__getitem__), max(bucket, key=highs.__getitem__)}
    return LoggedCurve(steps=[curve.steps[i] for i in sorted(kept)], values=[curve.values[i] for i in sorted(kept)])
