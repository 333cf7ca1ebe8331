"""The rows of an input, some at a time: a table, a file of texts, or a folder of images."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from lockstep.base.errors import DataError
from lockstep.data.sources._files import IMAGE_SUFFIXES

ROWS = 512
"""Of a chunk: the rows that one process predicts at a time, and the most that a killed one loses. The same for any
number of processes, because texts share a batch, and so a padding, with texts of their own chunk."""
CSV_BLOCK = 1 << 22
"""Bytes of CSV read at a time, so the longest row. The reader is up to 32 of them ahead: 0.3 GB in all, where blocks of
16 MB take 1.2 GB."""
FILE = "file"
"""The column of an image's path, from the folder that was given."""
Reader = Callable[[Path, str], Iterator[pa.Table]]


@dataclass(frozen=True, kw_only=True)
class Input:
    """What is to be predicted, not yet read."""

    path: Path
    column: str
    """Of the texts, or of the images' paths."""
    reader: Reader

    @property
    def modality(self) -> str:
        """Of its rows, as of a model."""
        return "image" if self.path.is_dir() else "text"

    def chunks(self) -> Iterator[pa.Table]:
        """All rows, ROWS in each chunk but the last; columns are of the types they have in that chunk.

        Raises DataError for an input that cannot be read, or lacks the column.
        """
        try:
            yield from rechunked(self.reader(self.path, self.column))
        except (OSError, ValueError, pa.ArrowException) as error:
            form = self.path.suffix.lower()[1:] if self.path.is_file() else "a folder"
            raise DataError(f"{self.path} cannot be read as {form}: {error}") from error


def opened(path: Path, text_column: str) -> Input:
    """The input at a path; raises DataError where there is none, or of no known form."""
    if not path.exists():
        raise DataError(f"there is no file or folder {path}: correct the path of what is to be predicted")
    if path.is_dir():
        return Input(path=path, column=FILE, reader=_folder)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} is of no known form: name it after its form ({', '.join(READERS)}), or give a folder of images"
        )
    return Input(path=path, column=text_column, reader=reader)


def rechunked(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, ROWS in each table but the last."""
    held: list[pa.Table] = []
    for table in tables:
        rest = table
        while rest.num_rows:
            part = rest.slice(0, ROWS - sum(each.num_rows for each in held))
            held.append(part)
            rest = rest.slice(part.num_rows)
            if sum(each.num_rows for each in held) == ROWS:
                yield joined(held)
                held = []
    if held:
        yield joined(held)


def joined(tables: list[pa.Table], schema: pa.Schema | None = None) -> pa.Table:
    """One after the other, as one piece; a column that one lacks is empty there. Raises ArrowInvalid for types of a
    column that have none in common."""
    first = [schema.empty_table()] if schema is not None else []
    return pa.concat_tables([*first, *tables], promote_options="permissive").combine_chunks()


def packed(table: pa.Table) -> bytes:
    """As bytes, to be sent to a process or to be hashed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def unpacked(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def _require(column: str, names: list[str], where: object) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where} has {names.count(twice)} columns named {twice!r}: rename all but one")
    if column not in names:
        raise DataError(
            f"{where} has no column {column!r}: name the one that holds the texts with --text-column "
            f"(there is: {', '.join(names) or 'no column at all'})"
        )


def _csv(path: Path, column: str) -> Iterator[pa.Table]:
    """Every value as the text it is: "NA" and "007" are not interpreted, so that they leave as they came."""
    parsing = csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)
    reading = csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK)
    with csv.open_csv(path, reading, parsing) as reader:
        names = reader.schema.names
    _require(column, names, path)
    with csv.open_csv(
        path, reading, parsing, csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    ) as rows:
        for batch in rows:
            yield pa.Table.from_batches([batch])


def _json_lines(path: Path, column: str) -> Iterator[pa.Table]:
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_row(line, f"line {number}"))
                _require(column, list(rows[-1]), f"line {number} of {path}")
            if len(rows) == ROWS:
                yield _table(rows)
                rows = []
    yield _table(rows)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f'{where} is not an object such as {{"text": "..."}}')
    return row


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (OverflowError, pa.ArrowException) as error:
            raise ValueError(f"column {name!r}: {error}: make its values all of one kind") from None
    return pa.table(columns)


def _parquet(path: Path, column: str) -> Iterator[pa.Table]:
    with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:  # else the whole file would be held
        _require(column, file.schema_arrow.names, path)
        for batch in file.iter_batches(batch_size=ROWS, use_threads=False):
            yield _without_views(pa.Table.from_batches([batch]))


def _without_views(table: pa.Table) -> pa.Table:
    """Texts in the form that every writer knows."""
    kinds = [pa.large_string() if pa.types.is_string_view(field.type) else field.type for field in table.schema]
    return table.cast(pa.schema([field.with_type(kind) for field, kind in zip(table.schema, kinds, strict=True)]))


def _lines(path: Path, column: str) -> Iterator[pa.Table]:
    texts: list[str] = []
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            texts.append(line.removesuffix("\n"))
            if len(texts) == ROWS:
                yield pa.table({column: pa.array(texts, pa.string())})
                texts = []
    yield pa.table({column: pa.array(texts, pa.string())})


def _folder(path: Path, column: str) -> Iterator[pa.Table]:
    """Images in the order of their paths, which does not depend on the file system."""
    files = sorted(
        file.relative_to(path).parts
        for file in path.rglob("*")
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"{path} has no images in it ({', '.join(IMAGE_SUFFIXES)}), nor have its folders")
    yield pa.table({column: pa.array(["/".join(parts) for parts in files], pa.string())})


READERS: dict[str, Reader] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".txt": _lines,
}
