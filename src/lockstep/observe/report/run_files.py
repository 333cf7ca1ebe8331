"""Reads what a run wrote to its folder, for a report: settings, metrics, history, summary, evaluation.

Every file may be missing, cut short by a kill, or written by somebody else: what cannot be read is left out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic_core
import yaml
from pydantic import BaseModel, ValidationError

from lockstep.base import storage
from lockstep.base.errors import ConfigError, absence
from lockstep.observe import run_history
from lockstep.observe.run_settings import flattened

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"
MOST_BYTES = 1 << 30
"""Of metrics.jsonl and history.jsonl."""
NOT_CURVES = {"kind", "step", "epoch", "chain", "samples"}
TEST = "test"

M = TypeVar("M", bound=BaseModel)


class HistoryLine(BaseModel):
    """A line of history.jsonl; which values it has depends on its kind."""

    time: float
    """Seconds since 1970."""
    kind: Literal["started", "steps", "ranks", "evaluated", "texts", "saved", "steered", "regrouped", "warned", "ended"]
    step: int
    seconds: float = 0.0
    stall_seconds: float = 0.0
    memory_bytes: int = 0
    world_size: int = 1
    device: str = ""
    total_steps: int = 0
    steps_per_epoch: int = 0
    steps: int = 0
    ranks: list[int] = []
    phases: dict[str, list[float]] = {}
    """Phase -> seconds of each of the ranks."""
    delayed_seconds: list[float] = []
    micro_batches: list[int] = []
    memory_by_rank: list[int] = []
    message: str = ""
    status: str = ""
    texts: list[tuple[str, str]] = []
    """Prompts and what a language model made of them."""


class RunSummary(BaseModel):
    """What a report shows of summary.json."""

    status: str = ""
    """Empty where there is no summary: the run goes on, or was killed."""
    steps: int | None = None
    epochs: float | None = None
    world_size: int | None = None
    train_samples_per_second: float | None = None
    first_step_seconds: float | None = None
    evaluation: dict[str, float | None] = {}
    labels: list[str] = []
    confusion_matrix: list[list[int]] | None = None
    digest: str | None = None
    chain: str | None = None
    device: str | None = None
    torch_version: str | None = None
    numeric_recipe: dict[str, Any] = {}


class WorstSample(BaseModel):
    """A sample with a high loss."""

    origin: str
    label: str
    predicted: str
    confidence: float | None
    loss: float
    text: str = ""
    image: str = ""
    """A data URI."""


class StoredEvaluation(BaseModel):
    """What a report shows of evaluation.json."""

    worst: list[WorstSample] = []


@dataclass(frozen=True, kw_only=True)
class LoggedCurve:
    """Values of one quantity by step."""

    steps: list[int]
    values: list[float | None]
    """None where it was not finite."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """One run as its folder shows it."""

    name: str
    folder: Path
    settings: dict[str, Any]
    """Of recipe.yaml, by "section.key"."""
    curves: dict[str, LoggedCurve]
    history: list[HistoryLine]
    summary: RunSummary
    evaluation: StoredEvaluation
    notes: list[str]
    """What could not be read."""


def read(folder: Path) -> RunFiles:
    """Raises ConfigError for a folder that is no run's."""
    recipe, notes = folder / RECIPE, list[str]()
    if not recipe.is_file():
        what = absence(folder, f"there is no {RECIPE} in it")
        raise ConfigError(f"{folder} is no run: {what} (runs are folders such as runs/NAME)")
    try:
        settings = yaml.safe_load(storage.read_regular(recipe, storage.MOST_JSON_BYTES))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{recipe} cannot be read: {str(error).splitlines()[0]}") from None
    return RunFiles(
        name=folder.name,
        folder=folder,
        settings=dict(flattened(settings if isinstance(settings, dict) else {})),
        curves=curves(metric_lines(folder / METRICS, notes)),
        history=history_lines(folder / run_history.FILE, notes),
        summary=model_of(RunSummary, folder / SUMMARY, notes),
        evaluation=model_of(StoredEvaluation, folder / EVALUATION, notes),
        notes=notes,
    )


def metric_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Those with a step."""
    found, broken = [], 0
    for line in content(path, notes).splitlines():
        try:
            value = pydantic_core.from_json(line)
            if not isinstance(value["step"], int):
                raise ValueError("no step")
            found.append(value)
        except (ValueError, KeyError, TypeError):
            broken += 1
    note_broken(path, broken, notes)
    return found


def history_lines(path: Path, notes: list[str]) -> list[HistoryLine]:
    found, broken = [], 0
    for line in content(path, notes).splitlines():
        try:
            found.append(HistoryLine.model_validate_json(line))
        except ValidationError:
            broken += 1
    note_broken(path, broken, notes)
    return found


def content(path: Path, notes: list[str]) -> bytes:
    """Empty where there is no file."""
    try:
        return storage.read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return b""


def note_broken(path: Path, number: int, notes: list[str]) -> None:
    if number:
        notes.append(f"{number} line{'s' if number > 1 else ''} of {path.name} left out: cut short, or not readable")


def model_of(kind: type[M], path: Path, notes: list[str]) -> M:
    """The contents of a JSON file; the defaults where there is none, or no valid one."""
    text = content(path, notes)
    try:
        return kind.model_validate_json(text) if text else kind()
    except ValidationError as error:
        notes.append(f"{path.name} cannot be read: {error.errors()[0]['msg']}")
        return kind()


def curves(metrics: list[dict[str, Any]]) -> dict[str, LoggedCurve]:
    """Name -> curve; those of evaluations are called "test ..."."""
    found: dict[str, LoggedCurve] = {}
    for line in metrics:
        prefix = f"{TEST} " if line.get("kind") == "evaluation" else ""
        for name, value in line.items():
            if name not in NOT_CURVES and (value is None or isinstance(value, int | float)):
                curve = found.setdefault(f"{prefix}{name}", LoggedCurve(steps=[], values=[]))
                curve.steps.append(line["step"])
                curve.values.append(value)
    return found
