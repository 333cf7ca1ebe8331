"""All of an input looked at before any of it is predicted: how many rows, of which columns, whether each has a text."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import compute

from lockstep.base.errors import DataError
from lockstep.inference.predict.input_rows import ROWS, Input, joined, packed


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows that follow each other, as they were when the input was looked at."""

    number: int
    rows: int
    digest: str
    """By which these rows are known again, 16 hex digits."""

    @property
    def part(self) -> str:
        return f"{self.number:08}-{self.digest}.parquet"


@dataclass(frozen=True, kw_only=True)
class InputScan:
    input: Input
    schema: pa.Schema
    """Of all chunks: types that hold the values of each."""
    chunks: Sequence[Chunk]

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def again(self) -> Iterator[tuple[Chunk, pa.Table]]:
        """Each chunk with its rows, of the schema; raises DataError where they are no longer what they were."""
        expected = iter(self.chunks)
        for number, table in enumerate(self.input.chunks()):
            chunk = next(expected, None)
            if chunk is None or chunk != _chunk(self.input, number, table):
                raise self._changed()
            yield chunk, joined([table], self.schema)
        if next(expected, None) is not None:
            raise self._changed()

    def _changed(self) -> DataError:
        return DataError(f"{self.input.path} was changed while it was read: give the same command again")


def survey(source: Input) -> InputScan:
    """Read all of it; raises DataError for what cannot be read, a row without a text, columns of no common type."""
    schemas: list[pa.Schema] = []
    chunks: list[Chunk] = []
    for number, table in enumerate(source.chunks()):
        _check_texts(table, number * ROWS, source)
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
    return InputScan(input=source, schema=schema, chunks=tuple(chunks))


def _chunk(source: Input, number: int, table: pa.Table) -> Chunk:
    table = table.replace_schema_metadata()
    found = hashlib.sha256(packed(table))
    if source.modality == "image":  # their pixels are read once only, so size and time have to do
        for file in table.column(source.column).to_pylist():
            try:
                status = (source.path / file).stat()
            except OSError as error:
                raise DataError(
                    f"{source.path / file} cannot be read ({error.strerror}): replace or remove it"
                ) from None
            found.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
    return Chunk(number=number, rows=table.num_rows, digest=found.hexdigest()[:16])


def _check_texts(table: pa.Table, before: int, source: Input) -> None:
    """`before`: rows of the chunks before this one."""
    values = table.column(source.column)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not any(is_text(kind) for is_text in TEXTS):
        raise DataError(
            f"column {source.column!r} of {source.path} holds {kind}, not texts: name another one with --text-column"
        )
    there = compute.greater(compute.utf8_length(compute.utf8_trim_whitespace(values.cast(pa.string()))), 0)
    missing = compute.index(compute.fill_null(there, False), False).as_py()  # noqa: FBT003 (a value)
    if missing >= 0:
        raise DataError(f"row {before + missing + 1} of {source.path} has no text: fill it in or remove the row")


TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
