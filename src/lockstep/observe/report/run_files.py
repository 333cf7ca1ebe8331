"""Reads what a run wrote to its folder, for a report: settings, metrics, history, summary, evaluation.

Every file may be missing, cut short by a kill, or written by somebody else: what cannot be read is left out, and noted.
"""

import math
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, ValidationError, field_validator

from lockstep.base import storage
from lockstep.observe import run_history
from lockstep.observe.run_lines import HISTORY, METRIC, Count, HistoryLine, Lines, Name, Step
from lockstep.observe.run_settings import flattened, settings_file, settings_of

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"
MOST_KEPT_BYTES = 128 << 20
"""Size limit of history.jsonl, without the lines about ranks."""
MOST_KEPT_POINTS = 32_000
"""Limit of a curve's points while it is read; beyond it, three of four are left out."""
MOST_CURVES, MOST_NAME = 200, 200
TEST = "test"

M = TypeVar("M", bound=BaseModel)


class Drift(BaseModel):
    """A setting that a resume has changed."""

    step: Step
    field: str
    before: Any
    now: Any


class RunSummary(BaseModel):
    """Fields of summary.json that reports and comparisons need."""

    model_config = ConfigDict(allow_inf_nan=False)
    status: Name = ""
    """Empty where there is no summary: the run goes on, or was killed."""
    steps: Step | None = None
    epochs: float | None = None
    world_size: Count | None = None
    train_samples_per_second: float | None = None
    first_step_seconds: float | None = None
    evaluation: dict[Name, Annotated[float, AllowInfNan()] | None] = Field({}, max_length=1000)
    labels: list[str] = []
    confusion_matrix: list[list[Count]] | None = None
    digest: Name | None = None
    training_digest: Name | None = None
    chain: Name | None = None
    device: Name | None = None
    torch_version: Name | None = None
    numeric_recipe: dict[Name, Any] = Field({}, max_length=1000)
    drift: list[Drift] = []

    @field_validator("confusion_matrix")
    @classmethod
    def _is_square(cls, matrix: list[list[int]] | None) -> list[list[int]] | None:
        if matrix is not None and any(len(row) != len(matrix) for row in matrix):
            raise ValueError("not as many columns as rows")
        return matrix


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
    settings_file(folder)
    notes = list[str]()
    return RunFiles(
        name=folder.name,
        folder=folder,
        settings=dict(flattened(settings_of(folder))),
        curves=curves(folder / METRICS, notes),
        history=history_lines(folder / run_history.FILE, notes),
        summary=model_of(RunSummary, folder / SUMMARY, notes),
        evaluation=model_of(StoredEvaluation, folder / EVALUATION, notes),
        notes=notes,
    )


def history_lines(path: Path, notes: list[str]) -> list[HistoryLine]:
    """Read all lines except those about ranks; keep generated texts of the first and the last line with some."""
    found, size, lines = list[HistoryLine](), 0, Lines(path, HISTORY, notes)
    texts = list[int]()
    """Indices in `found` of lines with texts."""
    for line in lines:
        if line.kind == "ranks":
            continue
        if line.texts:
            for place in texts[1:]:
                found[place] = HistoryLine(time=found[place].time, kind="texts", step=found[place].step)
            texts = [*texts[:1], len(found)]
        else:
            size += lines.size
        if size > MOST_KEPT_BYTES:
            lines.is_cut = True
            break
        found.append(line)
    return found


def model_of(kind: type[M], path: Path, notes: list[str]) -> M:
    """Read a JSON file; return the defaults where there is none, or no valid one."""
    try:
        return kind.model_validate_json(storage.read_regular(path, storage.MOST_JSON_BYTES, follows_links=False))
    except FileNotFoundError:
        return kind()
    except OSError as error:
        reason = error.strerror
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
    notes.append(f"{path.name} cannot be read: {reason}")
    return kind()


def curves(path: Path, notes: list[str]) -> dict[str, LoggedCurve]:
    """Read metrics.jsonl: name -> curve of the values; those of evaluations are called "test ..."."""
    found: dict[str, LoggedCurve] = {}
    left_out = 0
    for line in Lines(path, METRIC, notes):
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
        notes.append(f"{left_out:,} values of {path.name} left out: a report has {MOST_CURVES} curves with short names")
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
