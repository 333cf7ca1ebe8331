"""Any data set of the Hugging Face hub, or a local folder in a format that `datasets` reads; as a stream, too."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.base.contracts import DataSpec, Source
from lockstep.base.errors import DataError
from lockstep.data.columns import MappedTexts, Place, check_named, require, rows_of
from lockstep.data.huggingface import image_of, load_split
from lockstep.data.images import ImageFile, SizedImages, decode, open_image
from lockstep.data.in_memory import Images, Texts
from lockstep.data.sources.hub import Config
from lockstep.data.stream import Stream
from lockstep.data.targets import COLUMNS, Targets
from lockstep.data.text_table import LARGE_BYTES
from lockstep.data.torch_dataset import DatasetSource

Encode = Callable[[list[Any], Place], Targets]
"""Cells of the label column -> targets."""


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """A split, with the locations of its samples for messages."""

    table: Any
    place: Place

    def column(self, name: str) -> list[Any]:
        return list(self.table.select_columns([name])[name])

    def cells(self, names: Sequence[str]) -> list[list[Any]]:
        """Return the values of columns, as `columns.Cells`. Raises DataError."""
        check_named(names, self.table.column_names, "the data set")
        return [self.column(name) for name in names]

    def mapped_texts(self, name: str) -> MappedTexts | None:
        """Return the texts of a large table without a copy; None for a small one, or one with rows that are no text."""
        column, order = self.table.data.column(name), self.table._indices
        is_text = column.type in ("string", "large_string") and column.null_count == 0
        if self.table.data.nbytes <= LARGE_BYTES or not is_text:
            return None
        return MappedTexts(column, None if order is None else order.column(0).to_numpy())

    def files(self, config: Config) -> Iterator[ImageFile]:
        """Yield the image files of the column of samples without decoding them."""
        for cell in self.table.select_columns([config.sample_column])[config.sample_column]:
            yield image_of(cell, config.name)


def build(config: Config, split: str) -> Source:
    """Load the "train" or "test" split: texts, or uint8 images [N, C, H, W]; the classes are the training split's.
    Raises DataError when the data set, a split or a column is missing, a sample damaged or not labelled."""
    train = _load(config, config.train_split)
    data = train if split == "train" else _load(config, config.test_split)
    if config.streaming:
        return _streamed(train.table, data.table, config)
    source = _held(train, data, config)
    source.cells = data.cells
    return source


def _held(train: HubSplit, data: HubSplit, config: Config) -> Texts | Images:
    targets = _targets(train, data, config)
    if config.modality == "text":
        mapped = None if config.labels == "tags" else data.mapped_texts(config.sample_column)
        if mapped is not None:
            return Texts(mapped, targets)
        texts = COLUMNS[config.labels].read_texts(data.column(config.sample_column), [*targets.values], data.place)
        return Texts(texts, targets)
    like, files = train.files(config), data.files(config)
    images, unreadable = decode(files, len(data.table), config, like=like, place=data.place)
    return Images(images, targets, unreadable=unreadable)


def _load(config: Config, split: str) -> HubSplit:
    origin = {"subset": config.subset, "revision": config.revision}
    table = load_split(config.name, split, cache=config.cache, streams=config.streaming, **origin)
    from datasets import Image

    where = f"{config.name}, split {split}"
    if table.column_names is None:
        raise DataError(f"the columns of {where} are not known before it is read: it cannot be streamed")
    require([config.sample_column, config.label_column], table.column_names, where, kind=config.modality)
    feature = table.features[config.sample_column]
    if config.modality == "image" and not isinstance(feature, Image):
        raise DataError(
            f"the column {config.sample_column!r} of {where} holds {feature}, not images: name another "
            f"data.image_column, or data.text_column if it holds texts"
        )
    return HubSplit(table=table, place=rows_of(where))


def _targets(train: HubSplit, data: HubSplit, config: Config) -> Targets:
    from datasets import ClassLabel

    column, kind = config.label_column, COLUMNS[config.labels]
    feature = train.table.features[column]
    names_in_list = getattr(getattr(feature, "feature", None), "names", None)
    if config.labels in ("classes", "tags") and names_in_list:  # a list of class numbers
        known = dict(enumerate(names_in_list))
        rows = [[known.get(number, number) for number in row or ()] for row in data.column(column)]
        return kind.encode(kind.read(rows, data.place), tuple(names_in_list), data.place)
    if config.labels != "class" or not isinstance(feature, ClassLabel):
        names = kind.names(kind.read(train.column(column), train.place), column)
        return kind.encode(kind.read(data.column(column), data.place), names, data.place)
    numbers = [-1 if number is None else number for number in data.column(column)]
    if -1 in numbers:
        raise DataError(
            f"{data.place(numbers.index(-1))} is not labelled (the answers of some test splits are secret): "
            f"name another data.test_split, 'validation' or 'train[:10%]' with data.train_split='train[10%:]'"
        )
    return Targets(values=np.array(numbers, dtype=np.int64), labels=tuple(feature.names))


def _streamed(train: Any, data: Any, config: Config) -> Source:
    """Return the samples of a split, an IterableDataset. Raises DataError unless the classes are known beforehand."""
    where = f"{config.name}, split {data.split}"
    encode = _encoder(train, config)
    targets = encode([], lambda _: where)
    column, is_image = config.sample_column, config.modality == "image"
    sized = SizedImages(config, (image_of(row[column], config.name) for row in train)) if is_image else None
    spec = DataSpec(modality=config.modality, image_shape=sized.fit.shape if sized else None, **targets.described)

    def convert(row: dict[str, Any], position: int) -> dict[str, Any]:
        place, given, labels = f"sample {position} of {where}", row[column], [row[config.label_column]]
        label = encode(labels, lambda _: place).values[0]
        if sized is None:
            (text,) = COLUMNS[config.labels].read_texts([given], labels, lambda _: place)
            return {"text": text, "label": label}
        return {"image": sized.pixels(open_image(image_of(given, config.name), place), place), "label": label}

    return DatasetSource(Stream(data, where, spec=spec, convert=convert), None, where)


def _encoder(train: Any, config: Config) -> Encode:
    """Return the encoder of the label column. Raises DataError where the names of its classes are not known."""
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
