"""The user's files: texts in CSV, JSON Lines or Parquet, or images in one folder per class."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.errors import DataError
from lockstep.data import tables
from lockstep.data.columns import Place, labels_of, names_of, positions, require, rows_of, texts_of
from lockstep.data.data_config import TABLE_SUFFIXES
from lockstep.data.images import decode
from lockstep.data.in_memory import Images, Texts
from lockstep.data.order import mix
from lockstep.data.sources.files import Config, is_table

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The content of a path: N samples (texts or image paths) and their N labels."""

    samples: list[Any]
    labels: list[str]
    place: Place


def build(config: Config, split: str) -> Images | Texts:
    """Load the "train" or "test" split, as texts or as uint8 images [N, C, H, W]; the classes are those of `train`.

    Raises DataError for missing or damaged files, columns, texts, images and labels.
    """
    train = _checked_read(config, config.train)
    names = names_of(train.labels)
    if config.test is None:
        data, rows = train, _split_rows(len(train.samples), config.test_fraction, split)
    else:
        data = train if split == "train" else _checked_read(config, config.test)
        rows = np.arange(len(data.samples))
    labels = positions(data.labels, names, data.place)[rows]
    samples = [data.samples[row] for row in rows]
    if config.modality == "text":
        return Texts(samples, labels, names)
    images, unreadable = decode(samples, len(samples), config, like=train.samples, place=lambda n: str(samples[n]))
    return Images(images, labels, names, unreadable=unreadable)


def _split_rows(samples: int, test_fraction: float, split: str) -> np.ndarray:
    """Indices of a split, int [<= samples]; a hash of its index assigns each sample to a split."""
    hashes = mix(np.arange(samples, dtype=np.uint64))
    held_out = (hashes >> np.uint64(11)) * 2.0**-53 < test_fraction
    rows = np.flatnonzero(held_out if split == "test" else ~held_out)
    if len(rows) == 0:
        raise DataError(
            f"holding {test_fraction:g} of {samples} samples out leaves no sample to {split} on: change "
            f"data.test_fraction, or give data.test"
        )
    return rows


def _checked_read(config: Config, path: Path) -> Found:
    if not path.exists():
        raise DataError(f"there is no file or folder {path}: correct data.train or data.test")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is a pipe or a device: give a file or a folder")
    if is_table(path) != (config.modality == "text"):
        raise DataError(f"{config.train} and {path} are a table and a folder of images: give two of one kind")
    return read(path, config.text_column, config.label_column)


def read(path: Path, text_column: str, label_column: str) -> Found:
    """Read the rows of a table, or the images of a folder of class folders. Raises DataError."""
    found = _table(path, text_column, label_column) if path.is_file() else _folder(path)
    if not found.samples:
        raise DataError(f"{path} holds no sample: it has columns, but no row below them")
    return found


def _folder(path: Path) -> Found:
    """List the images in the order of their paths, independent of the file system's."""
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
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(
            f"{path} is of no known form: name it after its form ({', '.join(TABLE_SUFFIXES)}), or give a folder"
        )
    columns = [text_column, label_column]
    texts, labels = tables.read_columns(path, columns, partial(require, columns))
    place = rows_of(path)
    return Found(samples=texts_of(texts, place), labels=labels_of(labels, place), place=place)
