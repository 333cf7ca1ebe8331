"""Tables in files, and configs that read them."""

import csv
import json

import pyarrow
import pytest
from pyarrow import parquet

from lockstep.base.errors import DataError
from lockstep.data.sources import _files as files


def complaint(build, config, split="train"):
    with pytest.raises(DataError) as caught:
        build(config, split)
    message = str(caught.value)
    assert "\n" not in message.strip()
    return message


def files_config(train, **settings):
    return files.Config(kind="files", train=train, **settings)


def write_table(path, rows, columns=("text", "label")):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table(dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows) + "\n\n")
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([columns, *rows])
    return path
