"""Files of a prediction: one for each chunk that is done, in a folder beside the output; and the output, one Parquet,
CSV or JSON lines file, which appears when it is complete.

Not through `pyarrow.dataset.write_dataset`: it writes folders, cannot write JSON lines, and does not sync.
"""

import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from filelock import FileLock, Timeout
from pyarrow import csv, parquet

from lockstep.base import storage
from lockstep.base.errors import DataError, LaunchError
from lockstep.inference.predict.input_rows import ROW, Chunk

FACTS, LOCK = "predicting.json", ".lock"
OWN_FILES = re.compile(r"(\d{8}-[0-9a-f]{16}\.parquet|predicting\.json)(\.tmp-[0-9a-f]+)?|\.lock")
DOUBTFUL = re.compile("date|time|duration|binary")
"""Types, also in lists, of which some values can be written to Parquet only: the year 12000, zones that are unknown."""
GROUP_BYTES = 1 << 26
"""Minimum size of the rows that are written at once: a row group of Parquet."""


@dataclass(frozen=True)
class ChunkFiles:
    folder: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this command alone; remove it afterwards if no chunk is in it. Raises LaunchError where
        another command holds it, DataError where it contains other files."""
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write to {self.folder.parent}: {error.strerror}; name another --out") from None
        other = next((path for path in self.folder.iterdir() if not OWN_FILES.fullmatch(path.name)), None)
        if other is not None:
            raise DataError(f"{self.folder} is needed for what is done so far, but holds {other.name}: move it away")
        try:
            lock = FileLock(self.folder / LOCK).acquire(timeout=0)
        except Timeout:
            raise LaunchError(f"another command has {self.folder}: wait for it, or name another --out") from None
        try:
            with lock:
                yield
        finally:
            if not self.names():
                shutil.rmtree(self.folder, ignore_errors=True)

    def names(self) -> set[str]:
        return {path.name for path in self.folder.glob("*.parquet")}

    def resume(self, facts: Mapping[str, Any], chunks: Sequence[Chunk]) -> tuple[set[str], str]:
        """Keep the files that are still valid, remove the others -> the names of those kept, a message for the user.
        `facts` is everything besides the rows that the predictions depend on."""
        try:
            previous = storage.read_json(self.folder / FACTS)
        except FileNotFoundError:
            previous = None
        except ValueError:
            previous = {}
        existing = self.names()
        done = existing & {chunk.file_name for chunk in chunks} if previous == facts else set()
        for path in self.folder.iterdir():
            if path.name not in done and path.name not in (FACTS, LOCK):
                path.unlink()
        if previous != facts:  # only now: new facts must never lie beside old predictions
            storage.write(self.folder / FACTS, json.dumps(facts, indent=1))
        if done:
            stale = f"; the rows of {len(existing - done):,} more have changed" if existing - done else ""
            return done, f"resuming: {len(done):,} of {len(chunks):,} chunks are done{stale}"
        if not existing:
            return done, ""
        names = [name for name in facts if previous is not None and previous.get(name) != facts[name]]
        reason = f"with another {', '.join(names)}" if names else "of another input"
        return done, f"starting anew: what {self.folder} holds was made {reason}"

    def tables(self, chunks: Sequence[Chunk]) -> Iterator[pa.Table]:
        """Yield the predictions, in the order of the input."""
        for chunk in chunks:
            yield parquet.read_table(self.folder / chunk.file_name, partitioning=None)

    def clear(self) -> None:
        for name in self.names():
            (self.folder / name).unlink()


Writer = Callable[[IO[bytes], pa.Schema, Iterable[pa.Table]], None]


def writer_of(out: Path) -> Writer:
    """Return the writer for the file's suffix. Raises DataError for an unknown suffix, or where no file can be."""
    if out.suffix.lower() not in WRITERS:
        raise DataError(f"{out} is of no form that can be written: end --out in {', '.join(WRITERS)}")
    if out.is_dir():
        raise DataError(f"{out} is a folder: name a file with --out")
    if out.exists() and not out.is_file():
        raise DataError(f"{out} is a pipe or a device: name a file with --out")
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


def check_rows(table: pa.Table, out: Path) -> None:
    """Raise DataError for columns and values that the format cannot hold, such as a date that only Parquet knows."""
    check(table.schema, out)
    for field in () if out.suffix.lower() == ".parquet" else table.schema:
        if DOUBTFUL.search(str(field.type)):
            part = table.select([field.name])
            try:
                writer_of(out)(io.BytesIO(), part.schema, [part])
            except (ValueError, OverflowError, pa.ArrowException) as error:
                raise DataError(
                    f"column {field.name!r} of the input holds what {out.suffix} cannot hold ({error}): write to "
                    ".parquet, or leave the column out of the input"
                ) from None


def write(out: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write the rows, and replace the file at the end, where `out` is a link the one that it leads to. Raises
    OSError."""
    with storage.replacing(Path(os.path.realpath(out))) as file:
        writer_of(out)(file, schema, _group(tables))


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


def _write_arrow(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], *, opened: Any) -> None:
    with opened(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _write_json_lines(file: IO[bytes], _: pa.Schema, tables: Iterable[pa.Table]) -> None:
    for table in tables:
        for batch in table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                kept = json.loads(row.pop(ROW, "{}"))
                values = kept | {name: _json_value(value) for name, value in row.items() if name not in kept}
                file.write(f"{json.dumps(values, ensure_ascii=False)}\n".encode())


def _json_value(value: Any) -> Any:
    """Convert to types of JSON: None for NaN and infinity, texts for dates. Raises ValueError for bytes."""
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, bytes):
        raise ValueError("bytes")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


WRITERS: dict[str, Writer] = {
    ".parquet": partial(_write_arrow, opened=partial(parquet.ParquetWriter, compression="zstd")),
    ".csv": partial(_write_arrow, opened=csv.CSVWriter),
    ".jsonl": _write_json_lines,
}
BINARY_TYPES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
