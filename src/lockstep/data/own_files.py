"""The user's own files: folders with a folder for each class, and the part that is held out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base import storage
from lockstep.base.contracts import samples_of
from lockstep.base.errors import DataError
from lockstep.data.columns import MappedTexts, Place
from lockstep.data.data_config import OwnFilesSection
from lockstep.data.order import mix
from lockstep.data.targets import LabelColumn, Targets

SUFFIXES = {"image": (".png", ".jpg", ".jpeg", ".bmp", ".webp"), "audio": (".wav", ".flac", ".ogg", ".mp3")}
"""Of the files of a modality."""
EXAMPLES = {"image": ("cat", "1.png"), "audio": ("bark", "1.wav")}
"""A class and a file."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The content of a path: N samples (texts or paths of files) and their N labels, as LabelColumn.read gives them."""

    samples: Sequence[Any]
    labels: list[Any]
    place: Place


def files_below(folder: Path, modality: str) -> Iterator[Path]:
    """The files of a modality, at any depth, in no particular order."""
    for file in folder.rglob("*"):
        if file.suffix.lower() in SUFFIXES[modality] and not file.name.startswith("."):
            yield file


def read_class_folders(path: Path, modality: str) -> Found:
    """The files of a folder of class folders, and their classes, in the order of their paths, independent of the file
    system's. Raises DataError where there are none."""
    classes = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    files = sorted((file.relative_to(path).parts, file) for folder in classes for file in files_below(folder, modality))
    if not files:
        what, example = samples_of(modality), path.joinpath(*EXAMPLES[modality])
        raise DataError(
            f"{path} has no {what} in folders: put those of each class into a folder with the name of the "
            f"class, such as {example} ({', '.join(SUFFIXES[modality])})"
        )
    samples = [file for _, file in files]
    storage.require_inside(samples, path)
    return Found(samples=samples, labels=[parts[0] for parts, _ in files], place=lambda n: str(samples[n]))


@dataclass(frozen=True, kw_only=True)
class OwnSplit:
    """The samples of a split, and their targets."""

    samples: Sequence[Any]
    targets: Targets
    train: Found
    """What training and test split were read from, or the training split alone."""


def split_of(section: OwnFilesSection, split: str, *, column: LabelColumn, read: Callable[[Path], Found]) -> OwnSplit:
    """The "train" or "test" split: data.test, or what is held out of data.train. The classes are those of `train`.
    Raises DataError."""
    train = _checked(section.train, read)
    names = column.names(train.labels, section.table_columns[1])
    if section.test is None:
        data, rows = train, _split_rows(len(train.samples), section.test_fraction, split)
    else:
        data = train if split == "train" else _checked(section.test, read)
        rows = np.arange(len(data.samples))
    targets = column.encode(data.labels, names, data.place)
    targets = replace(targets, values=targets.values[rows])
    mapped = data.samples if isinstance(data.samples, MappedTexts) else None
    samples = [data.samples[row] for row in rows] if mapped is None else mapped[rows]
    return OwnSplit(samples=samples, targets=targets, train=train)


def _checked(path: Path, read: Callable[[Path], Found]) -> Found:
    if not path.exists():
        raise DataError(f"there is no file or folder {path}: correct data.train or data.test")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is a pipe or a device: give a file or a folder")
    return read(path)


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
