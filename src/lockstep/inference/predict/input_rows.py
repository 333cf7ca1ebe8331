"""The rows of an input, a chunk at a time: a table, a file of texts, or a folder of images or sounds.

A first pass over all of it, before anything is predicted, finds its columns, and rows without a text.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import compute

from lockstep.base import storage
from lockstep.base.contracts import samples_of
from lockstep.base.errors import DataError
from lockstep.data import tables
from lockstep.data.chat import ASSISTANT
from lockstep.data.chat_forms import columns_of, messages_of, tools_of
from lockstep.data.own_files import SUFFIXES, files_below

CHUNK_ROWS = 512
"""Number of rows that one process predicts at a time, and the most that a killed one loses. The same for any number of
processes, because texts share a batch, and so its padding, with texts of their chunk."""
CSV_BLOCK_BYTES = 1 << 22
"""Maximum length of a row. The reader holds up to 0.3 GB; with blocks of 16 MB it is 1.2 GB."""
FILE_COLUMN = "file"
"""Column of paths, relative to the input folder."""
ROW = "\x1frow"
"""Column with a whole row of JSON, where the output keeps it as it is: besides it only the texts are a column."""
CHAT = "\x1fchat"
"""Column of the chats that are answered, as JSON; the output has the input's own."""
TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
Reader = Callable[[Path, str], Iterable[pa.Table]]


@dataclass(frozen=True, kw_only=True)
class PredictionInput:
    """A file or folder to predict, not yet read."""

    path: Path
    column: str
    """Column of the texts, of the files' paths, or CHAT."""
    reader: Reader
    modality: str = "text"
    names: set[str] = field(default_factory=set)
    """Names in the rows of JSON that have been read for an output that keeps them."""

    def chunks(self) -> Iterator[pa.Table]:
        """Yield all rows, CHUNK_ROWS in each table but the last; column types are inferred for each chunk. Raises
        DataError for an input that cannot be read, or lacks the column."""
        with tables.read_errors(self.path):
            yield from _rechunk(self.reader(self.path, self.column))

    def is_short(self) -> bool:
        """Return whether one chunk contains all rows; reads no more than that. Raises DataError as `chunks` does."""
        first = next(self.chunks(), None)
        return first is None or first.num_rows < CHUNK_ROWS


def open_input(
    path: Path, text_column: str, modality: str = "text", *, out: Path | None = None, messages_column: str | None = None
) -> PredictionInput:
    """Open the input at a path; a folder's files are of the modality, else images. Raises DataError where there is
    none, or one of an unknown format. Where `out` is JSON lines, rows of JSON are kept as they are. `messages_column`
    is the column of chats in JSON, for a chat model."""
    if not path.exists():
        raise DataError(f"there is no file or folder {path}: correct the path of what is to be predicted")
    if path.is_dir():
        modality = modality if modality in SUFFIXES else "image"
        reader = partial(_read_folder, modality=modality)
        return PredictionInput(path=path, column=FILE_COLUMN, reader=reader, modality=modality)
    if not path.is_file():
        raise DataError(f"{path} is a pipe or a device: give a file or a folder")
    form = tables.form_of(path)
    if form not in READERS:
        raise DataError(
            f"{path} is of no known form: name it after its form ({', '.join(READERS)}), or give a folder of images "
            "or sounds"
        )
    if READERS[form] is not _read_json:
        return PredictionInput(path=path, column=text_column, reader=READERS[form])
    chats, names = _chat_column(path, messages_column) if messages_column else None, set[str]()
    keeps = out is not None and out.suffix.lower() == ".jsonl"
    reader = partial(_read_json, chats=chats, names=names if keeps else None)
    return PredictionInput(path=path, column=CHAT if chats else text_column, reader=reader, names=names)


def _chat_column(path: Path, messages_column: str) -> str | None:
    """Return the column of messages in the first row of JSON, if there is one. Raises DataError."""
    with tables.read_errors(path):
        first = next((row for _, row in tables.json_rows(path, lambda *_: None)), {})
    found = columns_of([*first], messages_column)
    return found[0] if len(found) == 1 else None


def _rechunk(blocks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same rows, CHUNK_ROWS in each table but the last."""
    pending: list[pa.Table] = []
    missing = CHUNK_ROWS
    for block in blocks:
        while block.num_rows:
            pending.append(block.slice(0, missing))
            block = block.slice(missing)  # noqa: PLW2901
            missing -= pending[-1].num_rows
            if not missing:
                yield concatenated(pending)
                pending, missing = [], CHUNK_ROWS
    if pending:
        yield concatenated(pending)


def concatenated(blocks: list[pa.Table]) -> pa.Table:
    """Return one contiguous table, null where a block lacks a column. Raises ArrowInvalid without a common type."""
    return pa.concat_tables(blocks, promote_options="permissive").combine_chunks()


def serialize(table: pa.Table) -> bytes:
    """Return a table as bytes, to send to a process or to hash."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def deserialize(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def _check_columns(column: str, names: Sequence[str], where: object) -> None:
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise DataError(f"{where} has {names.count(duplicate)} columns named {duplicate!r}: rename all but one")
    if column not in names:
        raise DataError(
            f"{where} has no column {column!r}: name the one that holds the texts with --text-column "
            f"(there is: {', '.join(names) or 'no column at all'})"
        )


def _read_csv(path: Path, column: str) -> Iterator[pa.Table]:
    for batch in tables.csv_batches(path, partial(_check_columns, column), block_bytes=CSV_BLOCK_BYTES):
        yield pa.Table.from_batches([batch])


def _read_json(
    path: Path, column: str, *, chats: str | None = None, names: set[str] | None = None
) -> Iterator[pa.Table]:
    """Yield columns of JSON: a row that lacks a name has null there; or, with `names`, to which those of the rows are
    added, the texts alone, each beside its whole row."""
    rows = _json_rows(path, column, chats=chats)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        if names is None:
            yield _table([row for row, _ in chunk])
        else:
            names.update(name for row, _ in chunk for name in row if name != CHAT)
            yield _table([{column: row[column], ROW: text} for row, text in chunk])


def _json_rows(path: Path, column: str, *, chats: str | None) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield rows and their JSON; those with a column of chats have CHAT, and what is no plain value in them as JSON.
    Raises ValueError for half of a surrogate pair, which no output can hold, and for what is no chat."""
    for number, row in tables.json_rows(path, partial(_check_columns, chats or column)):
        try:
            text = json.dumps(row, ensure_ascii=False)
            text.encode()
            yield _with_chat(row, chats) if chats else row, text
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        except DataError as error:
            raise DataError(f"line {number} of {path}: {error}") from None


def _with_chat(row: dict[str, Any], column: str) -> dict[str, Any]:
    """Return a row with its chat as JSON in CHAT: messages up to what is asked, and tool schemas. Raises DataError."""
    messages = messages_of(row[column])
    while messages and messages[-1]["role"] == ASSISTANT:
        messages.pop()
    if not messages:
        raise DataError("every message is of the assistant: nothing is asked")
    chat = {"messages": messages, "tools": tools_of(row.get("tools"))}
    nested = {key: value for key, value in row.items() if isinstance(value, list | dict)}
    return row | {key: json.dumps(value, ensure_ascii=False) for key, value in {**nested, CHAT: chat}.items()}


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (OverflowError, pa.ArrowException) as error:
            raise ValueError(f"column {name!r}: {error}: make its values all of one kind") from None
    return pa.table(columns)


def _read_parquet(path: Path, column: str) -> Iterator[pa.Table]:
    for batch in tables.parquet_batches(path, partial(_check_columns, column), rows=CHUNK_ROWS):
        types = [pa.large_string() if pa.types.is_string_view(field.type) else field.type for field in batch.schema]
        fields = [field.with_type(kind) for field, kind in zip(batch.schema, types, strict=True)]
        yield pa.Table.from_batches([batch]).cast(pa.schema(fields))  # string views are unknown to some writers


def _read_lines(path: Path, column: str) -> Iterator[pa.Table]:
    with tables.open_text(path) as file:
        lines = iter(partial(file.readline, tables.MAX_LINE_CHARACTERS), "")
        while texts := [line.removesuffix("\n") for line in islice(lines, CHUNK_ROWS)]:
            if max(map(len, texts)) >= tables.MAX_LINE_CHARACTERS:
                raise ValueError(f"a line has {tables.MAX_LINE_CHARACTERS:,} characters or more: one line is one text")
            yield pa.table({column: pa.array(texts, pa.string())})


def _read_folder(path: Path, column: str, modality: str) -> Iterator[pa.Table]:
    """Yield the files' paths in sorted order, which does not depend on the file system."""
    files = sorted(file.relative_to(path).parts for file in files_below(path, modality))
    storage.require_inside((path.joinpath(*parts) for parts in files), path)
    if not files:
        known = ", ".join(SUFFIXES[modality])
        raise DataError(f"{path} has no {samples_of(modality)} in it ({known}), nor have its folders")
    yield pa.table({column: pa.array(["/".join(parts) for parts in files], pa.string())})


READERS: dict[str, Reader] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_lines,
}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive rows, as they were during the scan."""

    number: int
    rows: int
    digest: str
    """Digest of the rows, 16 hex digits."""

    @property
    def file_name(self) -> str:
        """Name of the file of its predictions."""
        return f"{self.number:08}-{self.digest}.parquet"

    @property
    def first_row(self) -> int:
        """Number of its first row in the input, from 1."""
        return self.number * CHUNK_ROWS + 1


@dataclass(frozen=True, kw_only=True)
class InputScan:
    input: PredictionInput
    schema: pa.Schema
    chunks: Sequence[Chunk]

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def read_again(self) -> Iterator[tuple[Chunk, pa.Table]]:
        """Yield each chunk with its rows in the common schema. Raises DataError if the input changed since the scan."""
        for number, (chunk, table) in enumerate(zip_longest(self.chunks, self.input.chunks())):
            if table is None or chunk != _chunk(self.input, number, table):
                raise DataError(f"{self.input.path} was changed while it was read: give the same command again")
            yield chunk, concatenated([self.schema.empty_table(), table])


def scan_input(source: PredictionInput, check: Callable[[pa.Table], None] = lambda _: None) -> InputScan:
    """Read the input. Raises DataError for an unreadable input, a row without a text, columns without a common type,
    and what `check` raises for the rows of a chunk."""
    schemas: list[pa.Schema] = []
    chunks: list[Chunk] = []
    for number, table in enumerate(source.chunks()):
        _check_texts(table, number * CHUNK_ROWS, source)
        check(table)
        schema = table.schema.remove_metadata()
        if schema not in schemas:
            schemas.append(schema)
        chunks.append(_chunk(source, number, table))
    if not chunks:
        raise DataError(f"{source.path} holds no row: there is nothing to predict")
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"{source.path}: {error}: make the values of that column all of one kind") from error
    return InputScan(input=source, schema=schema, chunks=chunks)


def _chunk(source: PredictionInput, number: int, table: pa.Table) -> Chunk:
    digest = hashlib.sha256(serialize(table.replace_schema_metadata()))
    if source.modality != "text":  # files are read only once: size and time stand for them
        for file in table.column(source.column).to_pylist():
            try:
                status = (source.path / file).stat()
            except OSError as error:
                raise DataError(
                    f"{source.path / file} cannot be read ({error.strerror}): replace or remove it"
                ) from None
            digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
    return Chunk(number=number, rows=table.num_rows, digest=digest.hexdigest()[:16])


def is_words(kind: pa.DataType) -> bool:
    """Return whether a column holds lists of texts, which are words."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and any(is_text(kind.value_type) for is_text in TEXT_TYPES)


def _check_texts(table: pa.Table, rows_before: int, source: PredictionInput) -> None:
    values = table.column(source.column)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if is_words(kind):
        values = compute.binary_join(values.cast(pa.list_(pa.string())), " ")
    elif not any(is_text(kind) for is_text in TEXT_TYPES):
        raise DataError(
            f"column {source.column!r} of {source.path} holds {kind}, not texts: name another one with --text-column"
        )
    has_text = compute.greater(compute.utf8_length(compute.utf8_trim_whitespace(values.cast(pa.string()))), 0)
    first_empty = compute.index(compute.fill_null(has_text, False), False).as_py()  # noqa: FBT003 (a value)
    if first_empty >= 0:
        row = rows_before + first_empty + 1
        raise DataError(f"row {row} of {source.path} has no text: fill it in or remove the row")
