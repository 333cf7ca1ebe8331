"""The user's own files: folders with a folder for each class, and the part that is held out."""

from collections import Counter
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

SUFFIXES = {
    "image": (
        *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".webp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".avif"),
    ),
    "audio": (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
}
"""Suffixes of the files of a modality."""
SYSTEM = {"__macosx", "__pycache__", "@eadir", "lost+found", "$recycle.bin", "system volume information"}
SYSTEM_FILES = {"thumbs.db", "desktop.ini", "icon\r"}
"""Names, in lower case, of what systems and programs put into folders, besides hidden files."""
SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
EXAMPLES = {"image": ("cat", "1.png"), "audio": ("bark", "1.wav")}
"""Class and file of an example, by modality."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The content of a path: N samples (texts or paths of files) and their N labels, as LabelColumn.read gives them."""

    samples: Sequence[Any]
    labels: list[Any]
    place: Place
    remarks: tuple[str, ...] = ()
    """Messages for the user about files that were left out."""
    empty: str = ""
    """Error message for a class without a sample; empty if there is none."""


def _is_foreign(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM


def files_below(folder: Path, modality: str) -> Iterator[Path]:
    """Yield the files of a modality, at any depth, in no particular order, except in hidden and system folders."""
    for file in folder.rglob("*"):
        if file.suffix.lower() in SUFFIXES[modality] and not any(map(_is_foreign, file.relative_to(folder).parts)):
            yield file


def read_class_folders(path: Path, modality: str) -> Found:
    """Return the files of a folder of class folders, and their classes, in the order of their paths, independent of the
    file system's. Raises DataError where there are none, and where the folders are splits."""
    classes = sorted(each.name for each in path.iterdir() if each.is_dir() and not _is_foreign(each.name))
    splits = sorted((name for name in classes if name.lower() in SPLITS), key=lambda name: not name.startswith("tr"))
    if len(splits) > 1:
        raise DataError(
            f"{path} holds the folders {' and '.join(splits)}, which are splits and no classes: set "
            f"data.train={path / splits[0]} and data.test={path / splits[1]}"
        )
    files = sorted(
        (file.relative_to(path).parts, file) for name in classes for file in files_below(path / name, modality)
    )
    what, suffixes = samples_of(modality), ", ".join(SUFFIXES[modality])
    if not files:
        example = path.joinpath(*EXAMPLES[modality])
        raise DataError(
            f"{path} has no {what} in folders: put those of each class into a folder with the name of the "
            f"class, such as {example} ({suffixes})"
        )
    samples, labels = [file for _, file in files], [parts[0] for parts, _ in files]
    storage.require_inside(samples, path)
    remark, empty = _left_out(path, modality), sorted({*classes} - {*labels})
    return Found(
        samples=samples,
        labels=labels,
        place=lambda n: str(samples[n]),
        remarks=(f"{path}: left out: {remark}",) if remark else (),
        empty=f"{path / empty[0]} holds none of the {what} that are read ({suffixes}): add some, or move it elsewhere"
        if empty
        else "",
    )


def _left_out(path: Path, modality: str) -> str:
    """Describe what of a folder of class folders is not read."""
    folders, others, outside = set[str](), Counter[str](), 0
    for file in path.rglob("*"):
        *above, name = file.relative_to(path).parts
        is_wanted = file.suffix.lower() in SUFFIXES[modality]
        if foreign := next(filter(_is_foreign, above), None):
            folders |= {foreign} if is_wanted else set()
        elif is_wanted:
            outside += not above and not _is_foreign(name)
        elif above and not _is_foreign(name) and name.lower() not in SYSTEM_FILES and file.is_file():
            others[file.suffix.lower() or "no suffix"] += 1
    found = [f"hidden and system folders ({', '.join(sorted(folders))})"] if folders else []
    found += [f"{others.total():,} of other kinds ({', '.join(sorted(others))})"] if others else []
    found += [f"{outside:,} {samples_of(modality)} in no folder of a class"] if outside else []
    return "; ".join(found)


@dataclass(frozen=True, kw_only=True)
class OwnSplit:
    """The samples of a split, and their targets."""

    samples: Sequence[Any]
    targets: Targets
    rows: np.ndarray
    """Their rows in the data that they were read from, int64."""
    train: Found
    """Data that both splits were read from, or the training split alone."""
    remarks: tuple[str, ...] = ()


def split_of(section: OwnFilesSection, split: str, *, column: LabelColumn, read: Callable[[Path], Found]) -> OwnSplit:
    """Return "train" or "test": data.test, or what is held out of data.train; classes of `train`. Raises DataError."""
    train = _checked(section.train, read)
    if train.empty:
        raise DataError(train.empty)
    names = column.names(train.labels, section.table_columns[1])
    if section.test is None:
        data, rows = train, _split_rows(len(train.samples), section.test_fraction, split)
    else:
        data = train if split == "train" else _checked(section.test, read)
        rows = np.arange(len(data.samples))
    targets = column.encode(data.labels, names, data.place)
    targets = replace(targets, values=targets.values[rows])
    samples = data.samples[rows] if isinstance(data.samples, MappedTexts) else [data.samples[row] for row in rows]
    remarks = data.remarks if split == "train" or section.test is not None else ()
    return OwnSplit(samples=samples, targets=targets, rows=rows, train=train, remarks=remarks)


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
