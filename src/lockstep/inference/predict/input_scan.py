"""A first pass over the whole input before anything is predicted: rows, columns, and that every row has a text."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import compute

from lockstep.base.errors import DataError
from lockstep.inference.predict.input_rows import CHUNK_ROWS, PredictionInput, concatenated, serialize

TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)


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


@dataclass(frozen=True, kw_only=True)
class InputScan:
    input: PredictionInput
    schema: pa.Schema
    """Schema common to all chunks."""
    chunks: Sequence[Chunk]

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def read_again(self) -> Iterator[tuple[Chunk, pa.Table]]:
        """Yield each chunk with its rows in the common schema. Raises DataError if the input changed since the scan."""
        expected = iter(self.chunks)
        for number, table in enumerate(self.input.chunks()):
            chunk = next(expected, None)
            if chunk is None or chunk != _chunk(self.input, number, table):
                raise self._change_error()
            yield chunk, concatenated([self.schema.empty_table(), table])
        if next(expected, None) is not None:
            raise self._change_error()

    def _change_error(self) -> DataError:
        return DataError(f"{self.input.path} was changed while it was read: give the same command again")


def scan_input(source: PredictionInput) -> InputScan:
    """Read the input. Raises DataError for an unreadable input, a row without a text, columns without a common type."""
    schemas: list[pa.Schema] = []
    chunks: list[Chunk] = []
    for number, table in enumerate(source.chunks()):
        _check_texts(table, number * CHUNK_ROWS, source)
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
