"""A data set of the Hugging Face hub that is read while training."""

from collections.abc import Callable
from typing import Any

from lockstep.base.contracts import DataSpec, Source
from lockstep.base.errors import DataError
from lockstep.data.columns import Place
from lockstep.data.huggingface import image_of
from lockstep.data.images import SizedImages
from lockstep.data.sources.hub import Config
from lockstep.data.stream import Stream
from lockstep.data.targets import COLUMNS, Targets
from lockstep.data.torch_dataset import DatasetSource

Encode = Callable[[list[Any], Place], Targets]
"""Cells of the label column -> targets."""


def hub_stream(train: Any, data: Any, config: Config) -> Source:
    """The samples of `data`, a split as a `datasets.IterableDataset`, like those of the training split.

    Raises DataError where the classes are not known before all samples are read.
    """
    where = f"{config.name}, split {data.split}"
    encode = _encoder(train, config)
    targets = encode([], lambda _: where)
    described: dict[str, Any] = {"labels": targets.labels, "numbers": targets.numbers, "objective": targets.objective}
    if config.modality == "text":
        spec = DataSpec(modality="text", **described)
        return DatasetSource(Stream(data, where, spec=spec, convert=_Texts(config, where, encode)), None, where)
    files = (image_of(row[config.sample_column], config.name) for row in train)
    sized = SizedImages(config, files)
    spec = DataSpec(modality="image", image_shape=sized.shape, **described)
    convert = _Images(config, where, encode, sized=sized)
    return DatasetSource(Stream(data, where, spec=spec, convert=convert), None, where)


class _Rows:
    """Turns rows into samples."""

    def __init__(self, config: Config, where: str, encode: Encode) -> None:
        self.config, self.where, self.encode = config, where, encode

    def place(self, position: int) -> Place:
        return lambda _: f"sample {position} of {self.where}"

    def target(self, row: dict[str, Any], position: int) -> Any:
        return self.encode([row[self.config.label_column]], self.place(position)).values[0]


class _Texts(_Rows):
    def __call__(self, row: dict[str, Any], position: int) -> dict[str, Any]:
        column, place = COLUMNS[self.config.labels], self.place(position)
        read = [row[self.config.label_column]]
        text = column.read_texts([row[self.config.sample_column]], read, place)[0]
        return {"text": text, "label": self.target(row, position)}


class _Images(_Rows):
    def __init__(self, config: Config, where: str, encode: Encode, *, sized: SizedImages) -> None:
        super().__init__(config, where, encode)
        self.sized = sized

    def __call__(self, row: dict[str, Any], position: int) -> dict[str, Any]:
        where = self.place(position)(0)
        image = self.sized.open(image_of(row[self.config.sample_column], self.config.name), where)
        return {"image": self.sized.pixels(image, where), "label": self.target(row, position)}


def _encoder(train: Any, config: Config) -> Encode:
    """How the label column is encoded. Raises DataError where the names of its classes are not known."""
    column, feature = COLUMNS[config.labels], train.features[config.label_column]
    feature = feature if config.labels in ("class", "number") else getattr(feature, "feature", None)
    names = (config.label_column,) if config.labels == "number" else getattr(feature, "names", None)
    if names is None:
        raise DataError(
            f"the column {config.label_column!r} of {config.name} does not name its classes, and a stream is not read "
            "before training: give it the type ClassLabel, leave out data.streaming, or use data.kind=user"
        )
    known = tuple(names)

    def named(cell: Any, place: Place) -> Any:
        if isinstance(cell, list):
            return [named(number, place) for number in cell]
        if config.labels == "number" or isinstance(cell, str):
            return cell
        if cell is None or not 0 <= cell < len(known):
            raise DataError(f"{place(0)} is not labelled: name another split, or leave such samples out of the data")
        return known[cell]

    def encode(cells: list[Any], place: Place) -> Targets:
        return column.encode(column.read([named(cell, place) for cell in cells], place), known, place)

    return encode
