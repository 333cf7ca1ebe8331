"""The folder of a run or of a script's own loop: the names of its files, and the one way to read each of them.

Every file may be missing, cut short by a kill, or written by somebody else: what cannot be read is left out, and noted.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, ValidationError, field_validator

from lockstep.base import storage
from lockstep.base.errors import ConfigError, absence
from lockstep.base.yaml_text import KeyLocations, read, read_file
from lockstep.observe.run_lines import HISTORY, METRIC, SPIKE, Count, HistoryLine, Lines, MetricLine, Name, Step

RECIPE, LOOP = "recipe.yaml", "loop.yaml"
"""Settings of a run from a config, and of a script's own loop (`lockstep.Loop`), in the sections of a config."""
METRICS, HISTORY_FILE, SUMMARY = "metrics.jsonl", "history.jsonl", "summary.json"
VARIABLES, HIDDEN = ("environment", "env_vars"), "***"
"""Settings of launchers that are variables of the processes; what is shown in place of their values."""
MOST_KEPT_BYTES = 128 << 20
"""Size limit of history.jsonl, without the lines about ranks."""

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
    parent: dict[Name, Any] | None = Field(None, max_length=10)
    """Checkpoint at which the run was forked: run, step, digest."""

    @field_validator("confusion_matrix")
    @classmethod
    def _is_square(cls, matrix: list[list[int]] | None) -> list[list[int]] | None:
        if matrix is not None and any(len(row) != len(matrix) for row in matrix):
            raise ValueError("not as many columns as rows")
        return matrix


class RunFolder:
    def __init__(self, path: Path, notes: list[str] | None = None) -> None:
        """`notes` gets sentences on what could not be read."""
        self.path, self.notes = path, [] if notes is None else notes

    @property
    def has_settings(self) -> bool:
        """Whether this is the folder of a run, or of a script's own loop."""
        return any((self.path / name).is_file() for name in (RECIPE, LOOP))

    def settings_file(self) -> Path:
        """Return the file with the settings. Raises ConfigError for a folder that is no run's."""
        for name in (RECIPE, LOOP):
            if (self.path / name).is_file():
                return self.path / name
        what = absence(self.path, f"there is no {RECIPE} in it")
        raise ConfigError(f"{self.path} is no run: {what} (runs are folders such as runs/NAME)")

    def settings(self) -> dict[str, Any]:
        """Return the sections of the settings. Raises ConfigError."""
        file = self.settings_file()
        if file.is_symlink():
            raise ConfigError(f"{file} is a link, which is not followed: it may lead out of the run's folder")
        settings = read(read_file(file), KeyLocations(str(file)))
        if not isinstance(settings, dict) or not all(isinstance(section, dict) for section in settings.values()):
            raise ConfigError(f"{file} has no sections")
        return settings

    def shown_settings(self) -> dict[str, Any]:
        """Return the sections of the settings for others to see, without values of variables, which may be tokens.
        Raises ConfigError."""
        settings = self.settings()
        return {**settings, "launch": _without_values(settings["launch"])} if "launch" in settings else settings

    def known_settings(self) -> dict[str, Any]:
        """Return the settings for others to see; none where they cannot be read."""
        with suppress(ConfigError):
            return self.shown_settings()
        return {}

    def metric_lines(self) -> Iterator[MetricLine]:
        """Yield the lines of steps and evaluations."""
        return (line for line in Lines(self.path / METRICS, METRIC, self.notes) if line.kind != SPIKE)

    def last_metric_lines(self) -> Iterator[MetricLine]:
        """Yield the whole lines at the end of metrics.jsonl, the newest first."""
        for text in reversed(storage.tail(self.path / METRICS).split("\n")[:-1]):
            with suppress(ValidationError):
                yield METRIC.validate_json(text)

    def history_lines(self) -> Lines[HistoryLine]:
        return Lines(self.path / HISTORY_FILE, HISTORY, self.notes)

    def history(self) -> list[HistoryLine]:
        """Read all lines except those about ranks; keep generated texts of the first and the last line with some."""
        found, size, lines = list[HistoryLine](), 0, self.history_lines()
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

    def summary(self) -> RunSummary:
        return self.model_of(RunSummary, SUMMARY)

    def model_of(self, kind: type[M], name: str) -> M:
        """Read a JSON file; return the defaults where there is none, or no valid one."""
        try:
            text = storage.read_regular(self.path / name, storage.MOST_JSON_BYTES, follows_links=False)
            return kind.model_validate_json(text)
        except FileNotFoundError:
            return kind()
        except OSError as error:
            reason = error.strerror
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
        self.notes.append(f"{name} cannot be read: {reason}")
        return kind()


def _without_values(value: Any, key: str = "") -> Any:
    """Replace the values of VARIABLES in a section by HIDDEN."""
    if not isinstance(value, Mapping):
        return value
    return {name: HIDDEN if key in VARIABLES else _without_values(each, name) for name, each in value.items()}


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("train.steps", 3) for {"train": {"steps": 3}}."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
