"""The user's files: texts in CSV, JSON Lines or Parquet, or images in one folder per class."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import csv, parquet

from lockstep.base.errors import DataError
from lockstep.data.columns import Place, labels_of, names_of, positions, require, rows_of, texts_of
from lockstep.data.images import decode
from lockstep.data.in_memory import Images, Texts
from lockstep.data.order import mix
from lockstep.data.sources.files import Config, is_table

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
CSV_BLOCK = 1 << 26
"""Bytes of CSV read at a time, so the longest row; the reader's own 1 MiB is less than a book"""


MOST_OF_A_LINE = 1 << 25
"""Characters: a file of zeros is one line that has no end."""


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
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} is of no known form: name it after its form ({', '.join(READERS)}), or give a folder")
    try:
        texts, labels = reader(path, [text_column, label_column])
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        is_encoding = isinstance(error, UnicodeDecodeError) or "invalid UTF8" in str(error)
        mend = ". Save it as UTF-8, for example with `iconv -f latin1 -t utf-8`" if is_encoding else ""
        raise DataError(f"{path} cannot be read as {path.suffix.lower()[1:]}: {error}{mend}") from error
    place = rows_of(path)
    return Found(samples=texts_of(texts, place), labels=labels_of(labels, place), place=place)


def _read_csv(path: Path, columns: Sequence[str]) -> list[list[Any]]:
    """Every value as the text it is: "NA" and "007" are not interpreted."""
    parsing = csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)
    reading = csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK)
    with csv.open_csv(path, reading, parsing) as reader:
        require(columns, reader.schema.names, path)
    texts = csv.ConvertOptions(include_columns=columns, column_types=dict.fromkeys(columns, pyarrow.string()))
    return [column.to_pylist() for column in csv.read_csv(path, reading, parsing, texts).columns]


def _read_json_lines(path: Path, columns: Sequence[str]) -> list[list[Any]]:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_OF_A_LINE), ""), 1):
            if len(line) == MOST_OF_A_LINE:
                raise ValueError(f"line {number} has more than {MOST_OF_A_LINE:,} characters: one line is one sample")
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    why = "it is nested too deeply" if isinstance(error, RecursionError) else error
                    raise ValueError(f"line {number}: {why}") from None
                if not isinstance(row, dict):
                    raise ValueError(f'line {number} is not an object such as {{"text": "...", "label": 1}}')
                require(columns, list(row), f"line {number} of {path}")
                rows.append([row[column] for column in columns])
    return [list(column) for column in zip(*rows, strict=True)] or [[], []]


def _read_parquet(path: Path, columns: Sequence[str]) -> list[list[Any]]:
    with parquet.ParquetFile(path) as file:
        require(columns, file.schema_arrow.names, path)
        table = file.read(columns=list(columns))
    return [table.column(column).to_pylist() for column in columns]


READERS = {".csv": _read_csv, ".tsv": _read_csv, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
