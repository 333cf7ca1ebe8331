"""What `lockstep predict` reads, before any process predicts: with little memory, and what is wrong is said."""

import gzip
import os
import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from lockstep.base.errors import DataError
from lockstep.data.tables import MAX_LINE_CHARACTERS
from lockstep.inference.predict import output_files
from lockstep.inference.predict.input_rows import CHUNK_ROWS, open_input, scan_input

TABLES = {
    "empty.csv": ("text\n", "holds no row"),
    "nothing.csv": ("", "cannot be read as csv"),
    "twice.csv": ("text,a,a\nb,c,d\n", "has 2 columns named 'a'"),
    "hole.csv": ("id,text\n1,a\n2, \n", "row 2 of hole.csv has no text"),
    "ragged.csv": ("id,text\n1,a\n2\n", "cannot be read as csv"),
    "bad.jsonl": ('{"text": "a"}\n{"text": \n', "cannot be read as jsonl: line 2"),
    "list.jsonl": ('["a"]\n', "line 1 is not an object"),
    "mixed.jsonl": ('{"text": "a", "n": 1}\n{"text": "a", "n": "one"}\n', "column 'n'"),
    "half.jsonl": ('{"text": "a"}\n{"text": "\\ud800"}\n', "cannot be read as jsonl: line 2"),
    "huge.jsonl": ('{"text": "a", "n": 123456789012345678901234567890}\n', "column 'n'"),
    "number.jsonl": ('{"text": 1}\n', "column 'text' of number.jsonl holds int64, not texts"),
    "hole.jsonl": ('{"text": "a"}\n{"text": null}\n', "row 2 of hole.jsonl has no text"),
    "parted.jsonl": (
        '{"text": "a", "n": 1}\n' * CHUNK_ROWS + '{"text": "a", "n": "one"}\n',
        "Field n has incompatible",
    ),
    "hole.txt": ("a\n\nb\n", "row 2 of hole.txt has no text"),
    "latin.txt": (b"caf\xe9\n", "cannot be read as txt"),
    "endless.txt.gz": (gzip.compress(b"\0" * (MAX_LINE_CHARACTERS + 9)), "one line is one text"),
    "plain.txt.gz": ("a\nb\n", "cannot be read as gz: Not a gzipped file"),
    "cut.txt.gz": (gzip.compress(b"a\nb\n")[:-9], "cannot be read as gz"),
    "torn.jsonl.gz": (gzip.compress(b'{"text": "a"}\n')[:10] + b"\xff" * 30, "cannot be read as gz"),
    "bad.parquet": ("PAR1", "cannot be read as parquet"),
    "in.xlsx": ("", "is of no known form: name it after its form (.csv, .tsv"),
    "body.csv": (
        "body,id\na,b\n",
        "no column 'text': name the one that holds the texts with --text-column (there is: b",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_cannot_be_used(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, said = TABLES[name]
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=re.escape(said)):
        scan_input(open_input(Path(name), "text"))


def test_a_link_is_written_through(tmp_path):
    """To where it leads, which may be another disk; not into a device."""
    table = pa.table({"text": ["a bank"]})
    (tmp_path / "disk").mkdir()
    for name, before in {"kept.csv": "before", "new.csv": None}.items():
        link, target = tmp_path / name, tmp_path / "disk" / name
        link.symlink_to(target)
        if before:
            target.write_text(before)
        output_files.write(link, table.schema, [table])
        assert link.is_symlink() and target.read_text() == '"text"\n"a bank"\n'
    (tmp_path / "null.csv").symlink_to("/dev/null")
    with pytest.raises(DataError, match="null.csv is a pipe or a device"):
        output_files.writer_of(tmp_path / "null.csv")


def test_an_input_that_changes_while_it_is_read(tmp_path):
    file = tmp_path / "in.txt"
    for before, after in (("a\nb\n", "a\n"), ("a\n", "a\nb\n"), ("a\n" * (CHUNK_ROWS + 1), "a\n" * CHUNK_ROWS)):
        file.write_text(before)
        found = scan_input(open_input(file, "text"))
        file.write_text(after)
        with pytest.raises(DataError, match="was changed while it was read"):
            list(found.read_again())


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Of one row group, which cannot be compressed: no more than a few chunks of it are held."""
    table = pa.table({"text": [os.urandom(50).hex() for _ in range(200_000)]})
    parquet.write_table(table, tmp_path / "in.parquet", use_dictionary=False)
    size, before = table.nbytes, pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in open_input(tmp_path / "in.parquet", "text").chunks()]
    assert len(held) == -(-200_000 // CHUNK_ROWS)
    assert max(held) < size / 5
