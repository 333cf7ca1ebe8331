"""The texts of a large table, copied once into the cache, where all processes map them into memory."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock

from lockstep.base import storage
from lockstep.base.errors import DataError
from lockstep.data import tables
from lockstep.data.columns import MappedTexts, Place, rows_of
from lockstep.data.targets import LabelColumn

LARGE_BYTES = 1 << 25
"""Smaller tables are held in memory, where a micro-batch is fetched faster. The texts are the same."""
VERSION = "1"
"""Version of the file's format."""
MAX_KNOWN = 1 << 16
"""Different labels of which each is held once."""
SCHEMA = pa.schema([("text", pa.large_binary()), ("label", pa.string())])
"""Texts as UTF-8, of which some may have lone surrogates, and labels as JSON of what LabelColumn.read gives."""


def open_table(
    path: Path, columns: Sequence[str], kind: LabelColumn, *, check: tables.Check, cache: Path
) -> tuple[MappedTexts, list[Any]]:
    """Return the texts and labels of a table, copied into the cache if they are not there yet. Raises DataError. Safe
    to call from many processes at once: one copies, the others wait for it."""
    found = path.stat()
    facts = [VERSION, str(path.absolute()), found.st_size, found.st_mtime_ns, type(kind).__name__, *columns]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    file = cache / "tables" / f"{key}.arrow"
    try:
        if (opened := _opened(file)) is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_suffix(".lock")):
                if (opened := _opened(file)) is None:  # another process may have made it meanwhile
                    _copy(tables.column_batches(path, columns, check), file, kind, place=rows_of(path))
                    opened = _opened(file)
    except OSError as error:
        raise DataError(
            f"cannot keep the texts of {path} in {cache}: {error.strerror or error}; name another folder with "
            "data.cache"
        ) from error
    assert opened is not None
    return MappedTexts(opened.column("text")), _labels(opened.column("label"))


def _opened(file: Path) -> Any:
    """Return the table in a file; None if there is none, or a damaged one."""
    with suppress(FileNotFoundError, pa.ArrowInvalid):
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        table.validate(full=True)
        return table
    return None


def _copy(batches: Iterator[list[list[Any]]], file: Path, kind: LabelColumn, *, place: Place) -> None:
    """Check the texts and labels of a table, and write them."""
    rows = 0
    with storage.replacing(file) as out, pa.ipc.new_file(out, SCHEMA) as writer:
        for texts, labels in batches:
            read = kind.read(labels, partial(_moved, place, rows))
            checked = kind.read_texts(texts, read, partial(_moved, place, rows))
            encoded = [text.encode("utf-8", "surrogatepass") for text in checked]
            writer.write_batch(pa.record_batch([encoded, [*map(json.dumps, read)]], schema=SCHEMA))
            rows += len(texts)


def _moved(place: Place, first: int, number: int) -> str:
    return place(first + number)


def _labels(column: Any) -> list[Any]:
    """Return the labels; equal ones are one object."""
    read = lru_cache(MAX_KNOWN)(json.loads)
    return [read(text) for chunk in column.chunks for text in chunk.to_pylist()]
