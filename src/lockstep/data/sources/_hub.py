"""Any data set of the Hugging Face hub, or a local folder in a format that `datasets` reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.errors import DataError
from lockstep.data.columns import Place, labels_of, names_of, positions, require, rows_of, texts_of
from lockstep.data.huggingface import load_split
from lockstep.data.images import ImageFile, decode
from lockstep.data.in_memory import Images, Texts
from lockstep.data.sources.hub import Config


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """A split, with the locations of its samples for messages."""

    table: Any
    place: Place

    def column(self, name: str) -> list[Any]:
        """Read all values of a column of texts or labels."""
        return list(self.table.select_columns([name])[name])

    def files(self, name: str) -> Iterator[ImageFile]:
        """Yield the image files of a column without decoding them."""
        from datasets import Image

        for cell in self.table.select_columns([name]).cast_column(name, Image(decode=False))[name]:
            yield None if cell is None else cell["bytes"] or Path(cell["path"])


def build(config: Config, split: str) -> Images | Texts:
    """Load the "train" or "test" split: texts, or uint8 images [N, C, H, W]; the classes are the training split's.

    Raises DataError when the data set, a split or a column is missing, a sample damaged or not labelled.
    """
    train = _load(config, config.train_split)
    data = train if split == "train" else _load(config, config.test_split)
    labels, names = _labels(train, data, config.label_column)
    if config.modality == "text":
        return Texts(texts_of(data.column(config.sample_column), data.place), labels, names)
    like, files = train.files(config.sample_column), data.files(config.sample_column)
    images, unreadable = decode(files, len(data.table), config, like=like, place=data.place)
    return Images(images, labels, names, unreadable=unreadable)


def _load(config: Config, split: str) -> HubSplit:
    table = load_split(config.name, split, subset=config.subset, revision=config.revision)
    from datasets import Image

    where = f"{config.name}, split {split}"
    require([config.sample_column, config.label_column], table.column_names, where, kind=config.modality)
    feature = table.features[config.sample_column]
    if config.modality == "image" and not isinstance(feature, Image):
        raise DataError(
            f"the column {config.sample_column!r} of {where} holds {feature}, not images: name another "
            f"data.image_column, or data.text_column if it holds texts"
        )
    return HubSplit(table=table, place=rows_of(where))


def _labels(train: HubSplit, data: HubSplit, column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    from datasets import ClassLabel

    feature = train.table.features[column]
    if not isinstance(feature, ClassLabel):
        names = names_of(labels_of(train.column(column), train.place))
        return positions(labels_of(data.column(column), data.place), names, data.place), names
    numbers = [-1 if number is None else number for number in data.column(column)]
    if -1 in numbers:
        raise DataError(
            f"{data.place(numbers.index(-1))} is not labelled (the answers of some test splits are secret): "
            f"name another data.test_split, 'validation' or 'train[:10%]' with data.train_split='train[10%:]'"
        )
    return np.array(numbers, dtype=np.int64), tuple(feature.names)
