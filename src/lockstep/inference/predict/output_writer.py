"""The output: one Parquet, CSV or JSON lines file, which appears when it is complete.

Not through `pyarrow.dataset.write_dataset`: it writes folders, cannot write JSON lines, and does not sync.
"""

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
from lockstep.inference.predict.input_rows import ROW

GROUP_BYTES = 1 << 26
"""Minimum size of the rows that are written at once: a row group of Parquet."""
Writer = Callable[[IO[bytes], pa.Schema, Iterable[pa.Table]], None]


def writer_of(out: Path) -> Writer:
    """Return the writer for the file's suffix. Raises DataError for an unknown suffix, or where no file can be."""
    if out.suffix.lower() not in WRITERS:
        raise DataError(f"{out} is of no form that can be written: end --out in {', '.join(WRITERS)}")
    if out.is_dir():
        raise DataError(f"{out} is a folder: name a file with --out")
    if not out.parent.is_dir():
        raise DataError(f"there is no folder {out.parent} to write {out.name} to: make it, or name another --out")
    return WRITERS[out.suffix.lower()]


def check(schema: pa.Schema, out: Path) -> None:
    """Raise DataError for columns that the format cannot hold."""
    if out.suffix.lower() == ".parquet":
        return
    for field in schema:
        is_nested = out.suffix.lower() == ".csv" and pa.types.is_nested(field.type)
        if is_nested or any(is_binary(field.type) for is_binary in BINARY_TYPES):
            raise DataError(
                f"column {field.name!r} of the input is {field.type}, which {out.suffix} cannot hold: write to .parquet"
                f"{' or .jsonl' if is_nested else ''}, or leave the column out of the input"
            )


def write(out: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write the rows, and replace the file at the end. Raises OSError."""
    temporary = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            writer_of(out)(file, schema, _group(tables))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    storage.sync(out.parent)


def _group(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield larger tables of the same rows, GROUP_BYTES or more each but the last."""
    group: list[pa.Table] = []
    for table in tables:
        group.append(table)
        if sum(each.nbytes for each in group) >= GROUP_BYTES:
            yield pa.concat_tables(group)
            group = []
    if group:
        yield pa.concat_tables(group)


def _write_parquet(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def _write_csv(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with csv.CSVWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _write_json_lines(file: IO[bytes], _: pa.Schema, tables: Iterable[pa.Table]) -> None:
    for table in tables:
        for batch in table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                kept = json.loads(row.pop(ROW, "{}"))
                values = kept | {name: _json_value(value) for name, value in row.items() if name not in kept}
                file.write(f"{json.dumps(values, ensure_ascii=False, default=str)}\n".encode())


def _json_value(value: Any) -> Any:
    """Return None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


WRITERS: dict[str, Writer] = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_json_lines}
BINARY_TYPES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
