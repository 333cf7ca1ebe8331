"""What an export tells about itself: lockstep.json, beside the weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from lockstep.base import storage
from lockstep.base.config import PluginSection
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.data.data_config import Origin
from lockstep.inference.export.export_config import DType

FILE = "lockstep.json"
CALIBRATION = "calibration.json"
"""In a run's folder: the temperature that was fitted for some weights of it."""
UNTOLD = ("launch", "observe", "export")
"""Sections of a recipe that say nothing of the weights, but may hold accounts and variables of whoever trained them."""


MOST_LABELS = 10**6
Count = Annotated[int, Field(ge=0, le=2**53)]
Side = Annotated[int, Field(ge=1, le=2**16)]
"""Of an image, or how many channels."""
Text = Annotated[str, Field(max_length=2**16)]


def _plain(name: str) -> str:
    """A file of the export's own folder, or below."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if "\0" in name or ".." in parts or parts[:1] == ("/",) or PureWindowsPath(name).drive:
        raise ValueError("names a file outside of the export's folder")
    return name


FileName = Annotated[str, Field(max_length=4096), AfterValidator(_plain)]


class RoundTrip(BaseModel):
    """How what was read back compares with the model that was trained, on samples of the test split."""

    model_config = ConfigDict(frozen=True)

    samples: Count
    largest_difference: float
    """Of any logit, or whatever the model puts out."""
    largest_output: float
    """What that difference is to be seen beside."""
    labels_changed: Count
    """Samples that get another label."""
    accuracy_before: float | None
    """None where there are no labels to be right about."""
    accuracy_after: float | None
    same_weights: bool = False
    """Bit for bit those that were to be written; False where none can be read back, as from a graph."""

    def words(self, dtype: str) -> str:
        if dtype == "fp32":
            weights = "the same weights bit for bit; " if self.same_weights else ""
            rest = f" but for {self.largest_difference:.2g}" if self.largest_difference else " bit for bit"
            return f"read back: {weights}outputs on {self.samples:,} real samples are equal{rest}"
        lost = f"read back: on {self.samples:,} test samples {dtype} changes an output by up to "
        lost += f"{self.largest_difference:.2g}"
        if self.accuracy_before is None or self.accuracy_after is None:
            return lost
        return (
            f"{lost}, gives {self.labels_changed:,} another label and takes accuracy from {self.accuracy_before:.4f} "
            f"to {self.accuracy_after:.4f}"
        )


class Calibration(BaseModel):
    """A temperature that logits are divided by, so that confidences are as often right as they say."""

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(ge=1e-6, le=1e6, strict=True)]
    samples: Count
    """That it was fitted on; measured on as many others."""
    ece_before: float
    """Expected calibration error at temperature 1."""
    ece_after: float


class ExportFacts(BaseModel):
    """A model outside of its run."""

    model_config = ConfigDict(frozen=True)

    name: Text
    """The run's."""
    kind: Text
    """The export's format; "checkpoint" for one that was not exported."""
    dtype: DType = "fp32"
    file: FileName = ""
    """Of the weights."""
    files: tuple[FileName, ...] = ()
    """All that the export consists of; what else lies in its folder is somebody else's."""
    model: dict[str, Any]
    """The section of the recipe."""
    modality: Text
    labels: Annotated[tuple[Text, ...], Field(max_length=MOST_LABELS)]
    image_shape: tuple[Side, Side, Side] | None = None
    inputs: tuple[str, ...] = ()
    """Columns of a batch, in the order in which a traced graph takes them."""
    outputs: tuple[str, ...] = ()
    """Names of the tensors that the model returns, where it returns a dict."""
    step: Count
    digest: Annotated[str, Field(max_length=128)]
    """Of the weights in fp32, as they are evaluated: with train.ema their average; the one that the run printed."""
    metrics: dict[str, float]
    torch_version: str = ""
    """That it was trained with."""
    recipe: dict[str, dict[str, Any]]
    """The sections that the weights depend on."""
    origin: Origin | None = None
    """Of the data that it was trained on."""
    license: str | None = None
    language: tuple[str, ...] = ()
    """ISO 639 codes of the texts that it was made for."""
    base_model: str | None = None
    """The hub's name of the model that it was trained from."""
    agreement: RoundTrip | None = None
    calibration: Calibration | None = None

    @field_validator("model")
    @classmethod
    def _is_a_section(cls, model: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(model.get("kind"), str):
            raise ValueError("has no kind")
        if "file" in model and not (isinstance(model["file"], str) and _plain(model["file"])):
            raise ValueError("names no file")
        return model

    @property
    def spec(self) -> DataSpec:
        """What the model knows of the data."""
        return DataSpec(modality=self.modality, labels=self.labels, image_shape=self.image_shape)

    @property
    def title(self) -> str:
        return f"{self.name}@{self.digest[:8]}"

    @property
    def temperature(self) -> float:
        return self.calibration.temperature if self.calibration else 1.0


def facts_of(section: PluginSection, spec: DataSpec, *, recipe: Mapping[str, Any], **more: Any) -> ExportFacts:
    """The facts of a model by its section and data. An export is given to others: what only concerns the machine that
    it was made on is left out, and that machine's home folder is written as ~."""
    model = section.model_dump(mode="json")
    for key in ("file", "name"):  # a user's own code, and a pretrained model's files, are copied beside it
        if Path(model.get(key, "")).is_absolute():
            model[key] = Path(model[key]).name
    told = {name: _homeless(part) for name, part in recipe.items() if name not in UNTOLD}
    told.get("run", {}).pop("dir", None)
    return ExportFacts(model=_homeless(model), **asdict(spec), recipe=told, **more)


def _homeless(value: Any) -> Any:
    """Texts that begin with the home folder, at any depth, with ~ instead."""
    if isinstance(value, dict):
        return {key: _homeless(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_homeless(each) for each in value]
    if isinstance(value, str) and Path(value).is_relative_to(Path.home()):
        return f"~/{Path(value).relative_to(Path.home()).as_posix()}"
    return value


def keep_calibration(found: Calibration, folder: Path, *, digest: str) -> None:
    """Keep it in a run's folder, for the weights of this digest; what was kept for others is replaced."""
    storage.write(folder / CALIBRATION, json.dumps({"digest": digest, **found.model_dump(mode="json")}, indent=1))


def kept_calibration(folder: Path, *, digest: str) -> Calibration | None:
    """That of a run's folder, where it belongs to the weights of this digest."""
    try:
        kept = storage.read_json(folder / CALIBRATION)
        return Calibration.model_validate(kept) if kept["digest"] == digest else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / CALIBRATION} cannot be used ({error}): remove it") from None


def write(facts: ExportFacts, folder: Path) -> None:
    """Put them into an export's folder."""
    storage.write(folder / FILE, json.dumps(facts.model_dump(mode="json"), indent=1, ensure_ascii=False))


def read(folder: Path) -> ExportFacts:
    """Those of an export's folder; raises ModelError."""
    try:
        return ExportFacts.model_validate_json(storage.read(folder / FILE, storage.MOST_JSON_BYTES))
    except FileNotFoundError:
        raise ModelError(f"{folder} is no export: there is no {FILE} in it; `lockstep export RUN` writes one") from None
    except OSError as error:
        raise ModelError(f"{folder / FILE} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([*(str(part) for part in first["loc"]), first["msg"]])
        raise ModelError(
            f"{folder / FILE} cannot be used ({reason}): it is damaged, or written by a newer version of Lockstep; "
            "export the run again, into another folder, or update"
        ) from None
