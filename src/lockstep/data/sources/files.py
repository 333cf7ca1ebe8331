"""Your own files: texts in CSV, JSON lines or Parquet, or images in a folder for each class."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from lockstep.base.config import LocalPath
from lockstep.base.errors import DataError
from lockstep.data import tables
from lockstep.data.columns import Place, labels_of, names_of, positions, require, rows_of, texts_of
from lockstep.data.data_config import Origin
from lockstep.data.images import ImageSection, decode
from lockstep.data.in_memory import Images, Texts
from lockstep.data.order import mix

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


class Config(ImageSection):
    """Your own files: a folder holds images (FOLDER/CLASS/*.png), a file is a table with a text column."""

    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {"data": {"train": "data/train.csv"}}

    incidental: ClassVar[frozenset[str]] = ImageSection.incidental | {"train", "test"}

    train: LocalPath
    """What to learn from: a .csv, .tsv, .jsonl or .parquet file, or a folder with a folder for each class."""
    test: LocalPath | None = None
    """What to test on, in the same form; without it a part of `train` is held out."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """How much of `train` is held out when there is no `test`: always the same samples, whatever the seed."""
    text_column: str = "text"
    """The column of texts, in a table."""
    label_column: str = "label"
    """The column of labels, in a table."""

    @property
    def modality(self) -> str:
        """A folder is images, a file is texts; what is not there yet is judged by its name's suffix."""
        return "text" if is_table(self.train) else "image"

    def origin(self) -> Origin:
        """All that can be known: what the file or folder is called."""
        return Origin(name=self.train.stem or self.train.name)

    @property
    def table_columns(self) -> tuple[str, str]:
        return self.text_column, self.label_column


@dataclass(frozen=True, kw_only=True)
class Found:
    """What lies at a path: N samples (texts or image paths) and the N names of their classes."""

    samples: list[Any]
    labels: list[str]
    place: Place


"""What `lockstep init files` writes for settings without a default."""


def build(config: Config, split: str) -> Images | Texts:
    """The "train" or "test" split, as texts or as uint8 images [N, C, H, W]; the classes are `train`'s.

    Raises DataError for missing or damaged files, columns, texts, images and labels.
    """
    train = _part(config, config.train)
    names = names_of(train.labels)
    if config.test is None:
        part, rows = train, _share(len(train.samples), config.test_fraction, split)
    else:
        part = train if split == "train" else _part(config, config.test)
        rows = np.arange(len(part.samples))
    labels = positions(part.labels, names, part.place)[rows]
    samples = [part.samples[row] for row in rows]
    if config.modality == "text":
        return Texts(samples, labels, names)
    images, unreadable = decode(samples, len(samples), config, like=train.samples, place=lambda n: str(samples[n]))
    return Images(images, labels, names, unreadable=unreadable)


def is_table(path: Path) -> bool:
    """Whether a path is, or by its name will be, a table."""
    return path.is_file() or (not path.is_dir() and path.suffix.lower() in tables.SUFFIXES)


def _share(samples: int, test_fraction: float, split: str) -> np.ndarray:
    """Which samples are a split's, int [<= samples]: a hash of its number says where a sample belongs."""
    hashes = mix(np.arange(samples, dtype=np.uint64))
    held_out = (hashes >> np.uint64(11)) * 2.0**-53 < test_fraction
    rows = np.flatnonzero(held_out if split == "test" else ~held_out)
    if len(rows) == 0:
        raise DataError(
            f"holding {test_fraction:g} of {samples} samples out leaves no sample to {split} on: change "
            f"data.test_fraction, or give data.test"
        )
    return rows


def _part(config: Config, path: Path) -> Found:
    if not path.exists():
        raise DataError(f"there is no file or folder {path}: correct data.train or data.test")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is a pipe or a device: give a file or a folder")
    if is_table(path) != (config.modality == "text"):
        raise DataError(f"{config.train} and {path} are a table and a folder of images: give two of one kind")
    return read(path, config.text_column, config.label_column)


def read(path: Path, text_column: str, label_column: str) -> Found:
    """What lies at a path that exists: the rows of a table, or the images of a folder of class folders.

    Raises DataError.
    """
    found = _table(path, text_column, label_column) if path.is_file() else _folder(path)
    if not found.samples:
        raise DataError(f"{path} holds no sample: it has columns, but no row below them")
    return found


def _folder(path: Path) -> Found:
    """Images in the order of their paths, which does not depend on the file system."""
    classes = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    files = sorted(
        (file.relative_to(path).parts, file)
        for folder in classes
        for file in folder.rglob("*")
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"{path} has no images in folders: put those of each class into a folder with the name of the "
            f"class, such as {path / 'cat' / '1.png'} ({', '.join(IMAGE_SUFFIXES)})"
        )
    samples = [file for _, file in files]
    return Found(samples=samples, labels=[parts[0] for parts, _ in files], place=lambda n: str(samples[n]))


def _table(path: Path, text_column: str, label_column: str) -> Found:
    if path.suffix.lower() not in tables.SUFFIXES:
        raise DataError(
            f"{path} is of no known form: name it after its form ({', '.join(tables.SUFFIXES)}), or give a folder"
        )
    columns = [text_column, label_column]
    texts, labels = tables.read_columns(path, columns, partial(require, columns))
    place = rows_of(path)
    return Found(samples=texts_of(texts, place), labels=labels_of(labels, place), place=place)
