"""The metadata of an export: lockstep.json, beside the weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from lockstep.base import storage
from lockstep.base.config import PluginSection
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, ModelError
from lockstep.base.json_values import with_texts
from lockstep.data.data_config import Origin
from lockstep.models.objectives._choice import AUTO, objective_of
from lockstep.models.objectives._objective import Objective
from lockstep.recipe.export_config import DType

FILE = "lockstep.json"
CALIBRATION = "calibration.json"
"""File in a run's folder with the fitted temperature, and the digest of the weights that it is for."""
PRIVATE_SECTIONS = ("launch", "observe", "export")
"""Sections of a recipe that do not affect the weights, but may hold account names and environment variables."""
MAX_LABELS = 10**6
SPEC = ("modality", "labels", "numbers", "objective", "image_shape", "prepared", "vocabulary", "context")
"""The fields of DataSpec that belong to a model, and not only to its data."""
Count = Annotated[int, Field(ge=0, le=2**53)]
Dimension = Annotated[int, Field(ge=1, le=2**16)]
"""Channels, height or width of an image."""
Text = Annotated[str, Field(max_length=2**16)]


def _inside(name: str) -> str:
    """Raise ValueError for a path that leads out of the export's folder."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if "\0" in name or ".." in parts or parts[:1] == ("/",) or PureWindowsPath(name).drive:
        raise ValueError("names a file outside of the export's folder")
    return name


FileName = Annotated[str, Field(max_length=4096), AfterValidator(_inside)]


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a file of code in an export. Raises FileNotFoundError, and ModelError for a link."""
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        raise ModelError(f"{path} is a link, which is not followed: put the file itself into the export's folder")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {name} in it")
    return path


class RoundTrip(BaseModel):
    """Comparison of the export, read back, with the trained model on samples of the test split."""

    model_config = ConfigDict(frozen=True)

    samples: Count
    largest_difference: float
    """Largest absolute difference of a logit or other output."""
    largest_output: float
    """Largest absolute output, the scale of that difference."""
    labels_changed: Count
    """Number of samples, or words, with another predicted label."""
    accuracy_before: float | None
    """Accuracy of the trained model; None without labels."""
    accuracy_after: float | None
    same_weights: bool = False
    """Whether weights are equal bit for bit; False where they cannot be read back, as from a graph."""

    def summary(self, dtype: str) -> str:
        if dtype == "fp32":
            weights = "the same weights bit for bit; " if self.same_weights else ""
            rest = f" but for {self.largest_difference:.2g}" if self.largest_difference else " bit for bit"
            return f"read back: {weights}outputs on {self.samples:,} real samples are equal{rest}"
        change = f"read back: on {self.samples:,} test samples {dtype} changes an output by up to "
        change += f"{self.largest_difference:.2g}"
        if self.accuracy_before is None or self.accuracy_after is None:
            return change
        return (
            f"{change}, gives {self.labels_changed:,} another label and takes accuracy from {self.accuracy_before:.4f} "
            f"to {self.accuracy_after:.4f}"
        )


class Calibration(BaseModel):
    """A temperature that logits are divided by, so that confidences match accuracy."""

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(ge=1e-6, le=1e6, strict=True)]
    samples: Count
    """Number of samples that it was fitted on; the errors are measured on the other half."""
    ece_before: float
    """Expected calibration error at temperature 1."""
    ece_after: float


class ExportFacts(BaseModel):
    """Metadata of a model outside of its run."""

    model_config = ConfigDict(frozen=True)

    name: Text
    kind: Text
    """Format of the export; "checkpoint" for a model that was not exported."""
    dtype: DType = "fp32"
    file: FileName = ""
    files: tuple[FileName, ...] = ()
    """All files of the export; others in its folder belong to the user."""
    model: dict[str, Any]
    """Section `model` of the recipe."""
    modality: Text
    labels: Annotated[tuple[Text, ...], Field(max_length=MAX_LABELS)]
    numbers: Annotated[tuple[Text, ...], Field(max_length=MAX_LABELS)] = ()
    """Names of the numbers that it predicts."""
    objective: Text = AUTO
    image_shape: tuple[Dimension, Dimension, Dimension] | None = None
    prepared: bool = False
    """Whether a file's pixels have to pass `prepare` first."""
    prepare: FileName = ""
    """Python file that defines `prepare`."""
    vocabulary: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Number of tokens of a language model."""
    context: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Number of tokens of a sample in training."""
    ends: tuple[Count, ...] = ()
    """Tokens that end a text."""
    inputs: tuple[str, ...] = ()
    """Columns of a batch, in the order in which a traced graph takes them."""
    outputs: tuple[str, ...] = ()
    """Names of the tensors that the model returns, where it returns a dict."""
    step: Count
    digest: Annotated[str, Field(max_length=128)]
    """Digest of the weights in fp32 as they are evaluated (with train.ema, the average), as printed by the run."""
    metrics: dict[str, float]
    torch_version: str = ""
    """Version of torch in training."""
    recipe: dict[str, dict[str, Any]]
    """Sections of the recipe that the weights depend on."""
    origin: Origin | None = None
    """Source of the training data."""
    license: str | None = None
    language: tuple[str, ...] = ()
    """ISO 639 codes of the texts."""
    base_model: str | None = None
    """Name on the hub of the model that training started from."""
    base: Text = ""
    """Model that an adapter was trained beside, a name on the hub or a folder."""
    base_digest: Annotated[str, Field(max_length=128)] = ""
    """Digest of the unchanged weights of that model."""
    base_settings: dict[str, Any] = {}
    """Settings of its network."""
    agreement: RoundTrip | None = None
    calibration: Calibration | None = None

    @field_validator("model")
    @classmethod
    def _is_a_section(cls, model: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(model.get("kind"), str):
            raise ValueError("has no kind")
        if "file" in model and not (isinstance(model["file"], str) and _inside(model["file"])):
            raise ValueError("names no file")
        return model

    @property
    def spec(self) -> DataSpec:
        """Description of the data, a part of the facts."""
        return DataSpec(**{name: getattr(self, name) for name in SPEC})

    @cached_property
    def learned(self) -> Objective:
        """Objective of the model. Raises ModelError."""
        return objective_of(self.spec)

    @property
    def title(self) -> str:
        return f"{self.name}@{self.digest[:8]}"

    @property
    def temperature(self) -> float:
        return self.calibration.temperature if self.calibration else 1.0


def facts_of(section: PluginSection, spec: DataSpec, *, recipe: Mapping[str, Any], **more: Any) -> ExportFacts:
    """Return a model's facts to pass on: without those of this machine alone, and with ~ for the home folder."""
    model = {name: value for name, value in section.model_dump(mode="json").items() if (name, value) != ("file", None)}
    for key in ("file", "name"):  # a user's own code, and a pretrained model's files, are copied beside it
        if Path(model.get(key, "")).is_absolute():
            model[key] = Path(model[key]).name
    public = with_texts({name: each for name, each in recipe.items() if name not in PRIVATE_SECTIONS}, _without_home)
    public.get("run", {}).pop("dir", None)
    return ExportFacts(
        model=with_texts(model, _without_home),
        **{name: value for name, value in asdict(spec).items() if name in SPEC},
        recipe=public,
        **more,
    )


def _without_home(text: str) -> str:
    """Replace the home folder at the beginning of a path by ~."""
    path, home = Path(text), Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else text


def keep_calibration(found: Calibration, folder: Path, *, digest: str) -> None:
    """Save a calibration in a run's folder, for the weights with this digest; replaces any other."""
    storage.write(folder / CALIBRATION, json.dumps({"digest": digest, **found.model_dump(mode="json")}, indent=1))


def kept_calibration(folder: Path, *, digest: str) -> Calibration | None:
    """Return the calibration saved in a run's folder, if it is for the weights with this digest."""
    try:
        saved = storage.read_json(folder / CALIBRATION)
        return Calibration.model_validate(saved) if saved["digest"] == digest else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / CALIBRATION} cannot be used ({error}): remove it") from None


def write(facts: ExportFacts, folder: Path) -> None:
    storage.write(folder / FILE, json.dumps(facts.model_dump(mode="json"), indent=1, ensure_ascii=False))


def read(folder: Path, base: str | None = None) -> ExportFacts:
    """Read facts from an export's folder; `base` is where the model of an adapter is now. Raises ModelError, and
    ConfigError for an export that has no such model."""
    try:
        facts = ExportFacts.model_validate_json(storage.read_regular(folder / FILE, storage.MOST_JSON_BYTES))
    except FileNotFoundError:
        raise ModelError(f"{folder} is no export: there is no {FILE} in it; `lockstep export RUN` writes one") from None
    except OSError as error:
        raise ModelError(f"{folder / FILE} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise ModelError(
            f"{folder / FILE} cannot be used ({reason}): it is damaged, or written by a newer version of Lockstep; "
            "export the run again, into another folder, or update"
        ) from None
    if base is None:
        return facts
    if facts.kind != "adapter":
        raise ConfigError(f"--base names the model of an adapter, but {folder} holds a whole model: leave it out")
    return facts.model_copy(update={"base": str(Path(base).absolute()) if Path(base).is_dir() else base})
