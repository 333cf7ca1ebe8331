"""Texts from files, in pieces of some kilobytes, or from a column of a data set, read when they are needed."""

import codecs
import hashlib
import pydoc_data.topics
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.contracts import Columns, DataSpec
from lockstep.base.errors import DataError
from lockstep.data.columns import Place, check_named, require, rows_of, texts_of
from lockstep.data.huggingface import load_split
from lockstep.data.in_memory import PlainTexts
from lockstep.data.packing import BEGIN, END, UNREADABLE, held_out_rows
from lockstep.data.sources.text import SUFFIXES, Config, text_files

MOST, LEAST = 16 << 10, 256
"""Bytes of a piece, which ends with the line in which it reaches them; a line goes on in the next piece after MOST."""
FEWEST = 64
"""Number of pieces that a small text is cut into, so that some of them can be held out."""
BEGINNING = 512
"""Bytes of a file that show whether it holds text."""


class Pieces:
    """Pieces of text files, in order; BEGIN stands before those that continue none, END behind those that the next one
    does not continue."""

    lengths: np.ndarray | None = None
    spec = DataSpec(modality="tokens")

    def __init__(self, files: Sequence[Path], table: np.ndarray, *, repairs: bool = False) -> None:
        """`table`, int64 [n, 3]: of each piece the number of its file, where it starts and where it stops there.
        `repairs` reads UNREADABLE in place of what is not UTF-8, which is an error else."""
        self.files, self.table, self.repairs = files, table, repairs
        continued = (table[1:, 0] == table[:-1, 0]) & (table[1:, 1] == table[:-1, 2])
        self.ends = np.append(~continued, True)  # noqa: FBT003 (a value)
        self.begins = np.append(True, ~continued)  # noqa: FBT003
        digest = hashlib.sha256(table.tobytes())
        for file in files:
            found = file.stat()
            digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {"text": m strings}. Raises DataError for bytes that are no text."""
        texts = (self._text(*self.table[i].tolist()) for i in indices)
        begins, ends = self.begins[np.asarray(indices, np.int64)], self.ends[np.asarray(indices, np.int64)]
        marks = zip(begins.tolist(), texts, ends.tolist(), strict=True)
        return {"text": [BEGIN * begins + text + END * ends for begins, text, ends in marks]}

    def _text(self, number: int, start: int, stop: int) -> str:
        path = self.files[number]
        try:
            with path.open("rb") as file:
                file.seek(start)
                found = file.read(stop - start)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        _check(found, path)
        if start == 0:
            found = found.removeprefix(codecs.BOM_UTF8)
        try:
            text = found.decode("utf-8", "replace" if self.repairs else "strict")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 (byte {start + error.start + 1}). Save it as UTF-8, for example with `iconv -f "
                "latin1 -t utf-8`, or set data.on_bad_sample=skip, which puts U+FFFD in place of such bytes"
            ) from None
        return text.replace(END, UNREADABLE)


class TextRows:
    """Some rows of a table that is mapped into memory, each a text of its own."""

    lengths: np.ndarray | None = None
    spec = DataSpec(modality="tokens")

    def __init__(self, table: Any, column: str, rows: np.ndarray, *, place: Place, repairs: bool = False) -> None:
        """`table` is a `datasets.Dataset`; `repairs` leaves out rows without a text, which are an error else."""
        self.whole, self.table, self.column, self.rows = table, table.select_columns([column]), column, rows
        self.place, self.repairs = place, repairs
        digest = hashlib.sha256(f"{column} {len(table)} {table._fingerprint}".encode())
        digest.update(rows.tobytes())
        for file in table.cache_files:
            found = Path(file["filename"]).stat()
            digest.update(f"{found.st_size} {found.st_mtime_ns}\n".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def cells(self, names: Sequence[str]) -> list[Any]:
        """Return the values of columns of the table, as `columns.Cells`. Raises DataError."""
        check_named(names, self.whole.column_names, "the data set")
        return [self.whole[self.rows][name] for name in names]

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {"text": m strings}. Raises DataError for a row without a text."""
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        cells = self.table[rows][self.column]
        if not self.repairs:
            texts_of(cells, lambda number: self.place(int(rows[number])))
        texts = (each.replace(END, UNREADABLE) if isinstance(each, str) else None for each in cells)
        return {"text": ["" if text is None else BEGIN + text + END for text in texts]}


def build(config: Config, split: str) -> Pieces | PlainTexts | TextRows:
    """Open the texts of the "train" or "test" split. Raises DataError for paths without text."""
    if config.name is not None:
        return _rows(config.name, config, split)
    if config.train is None:
        texts = [BEGIN + text + END for _, text in sorted(pydoc_data.topics.topics.items())]
        return PlainTexts([texts[row] for row in held_out_rows(len(texts), config.test_fraction, split)])
    try:
        return _pieces(config, split)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from None


def _rows(name: str, config: Config, split: str) -> TextRows:
    chosen = config.test_split if split == "test" and config.test_split is not None else config.train_split
    table = load_split(name, chosen, cache=config.cache, subset=config.subset, revision=config.revision)
    where, rows = f"{name}, split {chosen}", np.arange(len(table))
    require([config.text_column], table.column_names, where)
    if config.test_split is None:
        mend = "name another split for data.test_split"
        rows = held_out_rows(len(table), config.test_fraction, split, of=where, mend=mend)
    return TextRows(table, config.text_column, rows, place=rows_of(where), repairs=config.skips)


def _pieces(config: Config, split: str) -> Pieces:
    """Return the pieces of all files of the split, or some of them where a part is held out."""
    assert config.train is not None
    files = _found(config.train)
    if config.test is None:
        size = sum(file.stat().st_size for file in files)
        table = _table(files, min(MOST, max(LEAST, size // FEWEST)))
        table = table[held_out_rows(len(table), config.test_fraction, split)]
    else:
        tested = _found(config.test)
        seen = {file.resolve() for file in tested} if split == "train" else set()
        files = [file for file in files if file.resolve() not in seen] if split == "train" else tested
        if not files:
            raise DataError("data.test holds all files of data.train: leave it out, and a part of `train` is held out")
        table = _table(files, MOST)
    return Pieces(files, table, repairs=config.skips)


def _found(path: Path) -> list[Path]:
    """Return the files with text at a path."""
    if not path.exists():
        raise DataError(f"cannot read {path}: there is no such file or folder")
    files = [file for file in text_files(path) if file.is_file() and file.stat().st_size]
    if not files:
        raise DataError(
            f"{path} holds no text: name a text file, or a folder with files that end in {', '.join(SUFFIXES)}"
        )
    return files


def _table(files: Sequence[Path], size: int) -> np.ndarray:
    """Return the pieces of some files, one after the other: see Pieces."""
    rows = array("q")
    for number, file in enumerate(files):
        start = 0
        for stop in _cuts(file, size):
            rows.extend((number, start, stop))
            start = stop
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _cuts(path: Path, size: int) -> Iterator[int]:
    """Yield where the pieces of a file stop; reads little more of it than the ends of its pieces."""
    with path.open("rb", buffering=BEGINNING) as file:
        _check(file.read(BEGINNING), path)
        stop, length = 0, file.seek(0, 2)
        while stop < length:
            file.seek(min(stop + size, length))
            rest = file.readline(MOST)
            stop = file.tell()
            if len(rest) == MOST and stop < length:
                stop -= _unfinished(rest)
            yield stop


def _check(found: bytes, path: Path) -> None:
    if b"\0" in found:
        raise DataError(f"{path} holds no text but zero bytes: leave it out, or if it is UTF-16, save it as UTF-8")


def _unfinished(text: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-4:])
    return len(decoder.getstate()[0])
