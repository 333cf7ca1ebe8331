"""Tables in files, read a batch at a time: CSV and TSV, JSON lines, Parquet.

Not through `pyarrow.dataset`: it holds a whole row group of Parquet (99 MB where `parquet_batches` holds 2) and more
blocks of CSV (702 MB instead of 144); its JSON reader turns texts that look like dates into timestamps, and does not
report line numbers.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from lockstep.base.errors import DataError
from lockstep.data.columns import check_named

MAX_LINE_CHARACTERS = 1 << 25
"""Limit of a JSON line: a file of zeros is one endless line."""
MAX_SPACES = 1 << 12
"""Most characters of white space before the list in a .json file."""
LARGE_BLOCK_BYTES = 1 << 26
"""Block size of CSV for tables that are held in memory; the reader's default of 1 MiB is less than a book."""
BLOCK_BYTES, BATCH_ROWS = 1 << 23, 1 << 12
"""Block size of CSV, and rows of other tables, that are read at a time."""
LEAST_BYTES, MOST_TIMES = 1 << 30, 100
"""Limit of any file's unpacked size, and that of a larger one in times of its size."""
PAGE_HEADER_BYTES, FEW_ROWS = 64, 64
"""Header size of a Parquet page; rows at a time of columns whose values may repeat the ones before."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16."""
Part = TypeVar("Part")
Check = Callable[[Sequence[str], object], None]
"""Takes the names of the columns and where they are; raises DataError if a required one is missing or ambiguous."""


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors of the readers into a DataError that names the file."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                if file.read(2) in UTF_16:
                    raise ValueError(
                        "its text is UTF-16. Save it as UTF-8, for example with `iconv -f utf-16 -t utf-8`"
                    )
        yield
    except (OSError, EOFError, zlib.error, ValueError, pa.ArrowException) as error:
        form = path.suffix.lower()[1:] if path.is_file() else "a folder"
        is_encoding = isinstance(error, UnicodeDecodeError) or "invalid UTF8" in str(error)
        repair = ". Save it as UTF-8, for example with `iconv -f latin1 -t utf-8`" if is_encoding else ""
        raise DataError(f"{path} cannot be read as {form}: {error}{repair}") from error


def most_bytes(path: Path) -> int:
    """Return the limit of a file's unpacked size."""
    return max(LEAST_BYTES, MOST_TIMES * path.stat().st_size)


def metered(path: Path, parts: Iterable[Part], size: Callable[[Part], int]) -> Iterator[Part]:
    """Yield the parts that a file unpacks to. Raises DataError where their sizes exceed most_bytes()."""
    most, total = most_bytes(path), 0
    for part in parts:
        total += size(part)
        if total > most:
            raise DataError(
                f"{path} has {path.stat().st_size:,} bytes, and becomes more than {most:,} ({MOST_TIMES} times its "
                "size, or 1 GiB): if it is yours, write it uncompressed, such as .jsonl"
            )
        yield part


def read_columns(path: Path, columns: Sequence[str], check: Check) -> list[list[Any]]:
    """Return all values of some columns of a file with one of the TABLE_SUFFIXES. Raises DataError."""
    if path.suffix.lower() in (".jsonl", ".parquet"):
        values: list[list[Any]] = [[] for _ in columns]
        for batch in column_batches(path, columns, check):
            for column, found in zip(values, batch, strict=True):
                column += found
        return values
    with read_errors(path):  # at once: the streaming reader would hold up to 32 large blocks of all columns
        table = csv.read_csv(path, *_csv_options(path, check, columns=columns, block_bytes=LARGE_BLOCK_BYTES))
        return [table.column(name).to_pylist() for name in columns]


def cells(path: Path, rows: np.ndarray, names: Sequence[str]) -> list[list[Any]]:
    """Return the values of some columns in these rows of a file, as `columns.Cells`. Raises DataError."""
    return [[values[row] for row in rows] for values in read_columns(path, names, partial(check_named, names))]


def column_batches(path: Path, columns: Sequence[str], check: Check) -> Iterator[list[list[Any]]]:
    """Yield some columns of a file with one of the TABLE_SUFFIXES, some rows at a time. Raises DataError."""
    with read_errors(path):
        if path.suffix.lower() == ".jsonl":
            rows = json_rows(path, check)
            while some := list(islice(rows, BATCH_ROWS)):
                yield [[row[name] for _, row in some] for name in columns]
            return
        if path.suffix.lower() == ".parquet":
            batches = parquet_batches(path, check, columns=columns)
        else:
            batches = csv_batches(path, check, columns=columns, block_bytes=BLOCK_BYTES)
        for batch in batches:
            yield [batch.column(name).to_pylist() for name in columns]


def csv_batches(path: Path, check: Check, *, columns: Sequence[str] = (), block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield batches with every value as text; by default of all columns. `block_bytes` are read at a time, which limits
    the length of a row; the reader is up to 32 blocks ahead."""
    with csv.open_csv(path, *_csv_options(path, check, columns=columns, block_bytes=block_bytes)) as reader:
        yield from reader


def _csv_options(path: Path, check: Check, *, columns: Sequence[str], block_bytes: int) -> tuple[Any, Any, Any]:
    """Return the options to read, parse and convert: "NA" and "007" stay texts. By default of all columns. If the first
    line has no separator of the file's suffix, but another one, that one separates, as in some spreadsheets' CSV."""
    reading = csv.ReadOptions(use_threads=False, block_size=block_bytes)
    usual = "\t" if form_of(path) == ".tsv" else ","
    with open_text(path, errors="replace") as file:
        head = file.readline(MAX_LINE_CHARACTERS)
    other = next((each for each in ";\t|" if each in head), usual)
    parsing = csv.ParseOptions(delimiter=usual if usual in head else other, newlines_in_values=True)
    with csv.open_csv(path, reading, parsing) as reader:
        names = reader.schema.names
    check(names, path)
    converting = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), include_columns=list(dict.fromkeys(columns))
    )
    return reading, parsing, converting


def parquet_batches(
    path: Path, check: Check, *, columns: Sequence[str] = (), rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most `rows` rows, by default of all columns. Raises DataError for too large a file."""
    with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:  # else the whole file would be held
        names = file.schema_arrow.names
        check(names, path)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        chosen = [each for each in chunks if each.num_values and each.path_in_schema.startswith((*(columns or names),))]
        sizes = metered(path, chosen, lambda each: max(each.total_uncompressed_size, 8 * each.num_values))
        with path.open("rb", buffering=PAGE_HEADER_BYTES) as opened:  # a repeated value may be as large as this
            largest = max((_first_page_bytes(opened, each) for each in sizes), default=1)
        few = FEW_ROWS if any("DELTA_BYTE_ARRAY" in each.encodings for each in chosen) else rows
        rows = max(1, min(rows, few, most_bytes(path) // max(8, 8 * largest)))  # an eighth, as what grows is copied
        batches = file.iter_batches(batch_size=rows, columns=list(columns) or None, use_threads=False)
        yield from metered(path, batches, pa.RecordBatch.get_total_buffer_size)


def _first_page_bytes(file: BinaryIO, chunk: Any) -> int:
    """Return the unpacked size of the first page of a column, which holds its dictionary: the second field of its
    header, in Thrift's compact protocol."""
    file.seek(min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))))
    fields = re.match(rb"\x15[\x80-\xff]*[\0-\x7f]\x15([\x80-\xff]*[\0-\x7f])", file.read(PAGE_HEADER_BYTES), re.DOTALL)
    if fields is None:
        raise ValueError("a page has no header")
    return sum((byte & 127) << 7 * place for place, byte in enumerate(fields[1])) >> 1


def form_of(path: Path) -> str:
    """Return the suffix of a file, in lower case, without .gz."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """Open a text file, or one in a gzip archive."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", errors=errors)


def json_rows(path: Path, check: Check) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of JSON lines with its line number, from 1, or of a list in one .json file with its number; empty
    lines are skipped. Raises ValueError, which names the line."""
    with open_text(path) as file:
        is_list = form_of(path) == ".json" and file.read(MAX_SPACES).lstrip().startswith("[")
        file.seek(0)
        what, rows = ("row", _listed_rows(file, path)) if is_list else ("line", _line_rows(file))
        for number, row in rows:
            if not isinstance(row, dict):
                raise ValueError(f'{what} {number} is not an object such as {{"text": "..."}}')
            check(list(row), f"{what} {number} of {path}")
            yield number, row


def _line_rows(file: TextIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARACTERS), ""), 1):
        if len(line) == MAX_LINE_CHARACTERS:
            raise ValueError(f"line {number} has more than {MAX_LINE_CHARACTERS:,} characters: one line is one row")
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"line {number}: {reason}") from None


def _listed_rows(file: TextIO, path: Path) -> Iterator[tuple[int, Any]]:
    text = file.read(most_bytes(path))
    if file.read(1):
        raise ValueError(f"it has more than {most_bytes(path):,} characters: write it as JSON lines, a row on each")
    try:
        yield from enumerate(json.loads(text), 1)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
