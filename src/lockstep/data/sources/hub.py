"""Any data set of the Hugging Face hub, or a local folder in one of its forms."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from lockstep.base.errors import DataError
from lockstep.data.columns import Place, labels_of, names_of, positions, require, rows_of, texts_of
from lockstep.data.data_config import Origin
from lockstep.data.huggingface import load_split
from lockstep.data.images import ImageFile, ImageSection, decode
from lockstep.data.in_memory import Images, Texts


class Config(ImageSection):
    """A Hugging Face data set: one text or image column, and one label column."""

    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {"data": {"name": "fancyzhx/ag_news", "text_column": "text"}}

    name: str
    """Name on the hub (fancyzhx/ag_news), or a local folder of CSV, JSON, Parquet or image files."""
    subset: str | None = None
    """Which of its configurations, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of it; by default the newest. Only a commit keeps runs equal for ever."""
    train_split: str = "train"
    """The split to learn from; a slice such as train[10%:] is one too."""
    test_split: str = "test"
    """The split to test on; a slice such as train[:10%] is one too."""
    text_column: str | None = None
    """The column of texts; either this or image_column."""
    image_column: str | None = None
    """The column of images; either this or text_column."""
    label_column: str = "label"
    """The column of labels: class numbers with names, or any texts or numbers."""

    @model_validator(mode="after")
    def _one_modality(self) -> Self:
        if (self.text_column is None) == (self.image_column is None):
            raise ValueError("give exactly one of text_column and image_column: it says what a sample is")
        return self

    @property
    def modality(self) -> str:
        """As the column that is named."""
        return "image" if self.text_column is None else "text"

    @property
    def sample_column(self) -> str:
        """The column of texts or images."""
        return self.text_column or self.image_column or ""

    def origin(self) -> Origin:
        """As on the hub, or what the local folder is called."""
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            return Origin(name=folder.absolute().name, split=self.test_split)
        subset, revision, split = self.subset, self.revision, self.test_split
        return Origin(name=self.name, hub=self.name, subset=subset, revision=revision, split=split)

    @property
    def table_columns(self) -> tuple[str, str]:
        return self.text_column or "text", self.label_column


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of its splits, with the words for where a sample lies in it."""

    table: Any
    place: Place

    def column(self, name: str) -> list[Any]:
        """All values of a column that is not images."""
        return list(self.table.select_columns([name])[name])

    def files(self, name: str) -> Iterator[ImageFile]:
        """The image files of a column, one after the other, not decoded."""
        from datasets import Image

        for cell in self.table.select_columns([name]).cast_column(name, Image(decode=False))[name]:
            yield None if cell is None else cell["bytes"] or Path(cell["path"])


"""What `lockstep init hub` writes for settings without a default."""


def build(config: Config, split: str) -> Images | Texts:
    """The "train" or "test" split: texts, or uint8 images [N, C, H, W]; the classes are the training split's.

    Raises DataError when the data set, a split or a column is missing, a sample damaged or not labelled.
    """
    train = _load(config, config.train_split)
    part = train if split == "train" else _load(config, config.test_split)
    labels, names = _labels(train, part, config.label_column)
    if config.modality == "text":
        return Texts(texts_of(part.column(config.sample_column), part.place), labels, names)
    like, files = train.files(config.sample_column), part.files(config.sample_column)
    images, unreadable = decode(files, len(part.table), config, like=like, place=part.place)
    return Images(images, labels, names, unreadable=unreadable)


def _load(config: Config, split: str) -> Part:
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
    return Part(table=table, place=rows_of(where))


def _labels(train: Part, part: Part, column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    from datasets import ClassLabel

    feature = train.table.features[column]
    if not isinstance(feature, ClassLabel):
        names = names_of(labels_of(train.column(column), train.place))
        return positions(labels_of(part.column(column), part.place), names, part.place), names
    numbers = [-1 if number is None else number for number in part.column(column)]
    if -1 in numbers:
        raise DataError(
            f"{part.place(numbers.index(-1))} is not labelled (the answers of some test splits are secret): "
            f"name another data.test_split, 'validation' or 'train[:10%]' with data.train_split='train[10%:]'"
        )
    return np.array(numbers, dtype=np.int64), tuple(feature.names)
