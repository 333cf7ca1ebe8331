"""The output: a file of one of three forms, which appears when it is complete."""

import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyarrow import csv, parquet

from lockstep.base import storage
from lockstep.base.errors import DataError

GROUP_BYTES = 1 << 26
"""Rows are gathered up to this before they are written: a row group of Parquet."""
Writer = Callable[[IO[bytes], pa.Schema, Iterable[pa.Table]], None]


def writer_of(out: Path) -> Writer:
    """By the file's name; raises DataError for another one, or a place where nothing can be written."""
    if out.suffix.lower() not in WRITERS:
        raise DataError(f"{out} is of no form that can be written: end --out in {', '.join(WRITERS)}")
    if out.is_dir():
        raise DataError(f"{out} is a folder: name a file with --out")
    if not out.parent.is_dir():
        raise DataError(f"there is no folder {out.parent} to write {out.name} to: make it, or name another --out")
    return WRITERS[out.suffix.lower()]


def check(schema: pa.Schema, out: Path) -> None:
    """Raise DataError for columns that the form cannot hold."""
    if out.suffix.lower() == ".parquet":
        return
    for field in schema:
        nested = out.suffix.lower() == ".csv" and pa.types.is_nested(field.type)
        if nested or any(is_bytes(field.type) for is_bytes in BYTES):
            raise DataError(
                f"column {field.name!r} of the input is {field.type}, which {out.suffix} cannot hold: write to .parquet"
                f"{' or .jsonl' if nested else ''}, or leave the column out of the input"
            )


def write(out: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Put the rows into the file, which is replaced at the end. Raises OSError."""
    temporary = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            writer_of(out)(file, schema, _gathered(tables))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    storage.sync(out.parent)


def _gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(each.nbytes for each in held) >= GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _parquet(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def _csv(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with csv.CSVWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _json_lines(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    for table in tables:
        for batch in table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                values = {name: _plain(value) for name, value in row.items()}
                file.write(f"{json.dumps(values, ensure_ascii=False, default=str)}\n".encode())


def _plain(value: Any) -> Any:
    """JSON knows no number that is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


WRITERS: dict[str, Writer] = {".parquet": _parquet, ".csv": _csv, ".jsonl": _json_lines}
BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
