"""Configs, settings and files of data that nobody writes by intention, many of them, from one seed: each has an answer."""

import gzip
import json
import os
import random
import struct
import sys

import numpy as np
import pyarrow
import pytest
from fuzzing import table
from PIL import Image
from pyarrow import feather, parquet

from lockstep.recipe import recipe

SEED = 20
SECONDS = 30.0
VALUES = [
    *("nan", ".inf", "-1", "0", "1e400", "1e-400", "9" * 400, "0x" + "f" * 200, "010", "2024-01-01", "1:30", "''", "~"),
    *("[]", "{}", "[1, [2]]", "{a: {b: c}}", "yes", "'\\0'", '"\\ud800"', '"\\e[31m"', "é" * 300, "../..", "/dev/zero"),
    *("&a [*a]", "!!python/name:os.system ''", "!!binary YQ==", "auto", "-0.0", "18446744073709551616", "1_0", "none"),
]
TEXTS = [
    "",
    "[]",
    "3",
    "run",
    "run: {name: a}\nrun: {name: b}\n",
    "{[1]: 2}",
    "? {a: b}\n: c\n",
    "a: &a [*a]\n",
    "run: &r {name: a}\ntrain: *r\n",
    "run:\n\tname: a\n",
    "run: {name: 'a\n",
    "%YAML 9.9\n---\nrun: {}\n",
    "--- {}\n--- {}\n",
    "run: " + "{a: " * 3000,
    "run: " + "- " * 3000,
    "x" * 100_000,
    "\ufeffrun: {}\n",
    "run: {name: \u202ea}\n",
    "null: 1\n",
    "1: 2\n",
    "run: null\n",
    "run: [name]\n",
    "data: {kind: [digits]}\n",
    "model: {kind: {}}\n",
]
SMALL = "train: {steps: 1, global_batch: 4, micro_batch: 4}\nrun: {name: a}\nobserve: {sinks: []}\n"


def damaged(whole, number, seed):
    """Bytes that are cut off, changed, or joined with others."""
    chance = random.Random(f"{seed} {number}")
    place = chance.randrange(len(whole))
    way = number % 5
    if way == 0:
        return whole[:place]
    if way == 1:
        return whole[:place] + chance.randbytes(8) + whole[place + 8 :]
    if way == 2:
        return whole[:place] + b"\0" * 32 + whole[place:]
    if way == 3:
        return whole[place:]
    return whole[:4] + b"\xff" * 8 + whole[12:]


def tables(folder):
    """A whole file of each form, as bytes, by name."""
    rows = pyarrow.table({"text": ["good", "bad", "fine", "awful"] * 5, "label": ["yes", "no"] * 10})
    parquet.write_table(rows, folder / "whole.parquet")
    feather.write_feather(rows, folder / "whole.arrow")
    np.savez(folder / "whole.npz", x=np.zeros((4, 8)), y=np.arange(4))
    lines = [json.dumps(row) for row in rows.to_pylist()]
    return {
        "data.csv": ("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in rows.to_pylist())).encode(),
        "data.tsv": ("text\tlabel\n" + "".join(f"{r['text']}\t{r['label']}\n" for r in rows.to_pylist())).encode(),
        "data.jsonl": "\n".join(lines).encode(),
        "data.parquet": (folder / "whole.parquet").read_bytes(),
        "data.arrow": (folder / "whole.arrow").read_bytes(),
        "data.npz": (folder / "whole.npz").read_bytes(),
    }


BAD_TABLES = {
    "empty.csv": b"",
    "header.csv": b"text,label\n",
    "other columns.csv": b"a,b\n1,2\n",
    "twice.csv": b"text,text,label\na,b,c\n",
    "latin.csv": "text,label\né,a\né,b\n".encode("latin-1"),
    "utf-16.csv": "text,label\na,b\n".encode("utf-16"),
    "zero.csv": b"text,label\na\0b,c\nd,e\n",
    "quote.csv": b'text,label\n"a,b\n',
    "wide.csv": b"text,label\n" + b"x" * 3_000_000 + b",a\nb,c\n",
    "columns.csv": b",".join(b"c%d" % i for i in range(50_000)) + b"\n",
    "one class.csv": b"text,label\na,b\nc,b\nd,b\n",
    "no label.csv": b"text,label\na,\nb,\n",
    "list.jsonl": b"[1, 2]\n[3]\n",
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "nan.jsonl": b'{"text": NaN, "label": Infinity}\n{"text": 1, "label": 2}\n',
    "number.jsonl": b'{"text": "a", "label": ' + b"9" * 5000 + b"}\n",
    "half.jsonl": b'{"text": "\\ud800", "label": "a"}\n{"text": "b", "label": "c"}\n',
    "types.jsonl": b'{"text": {"a": 1}, "label": ["b"]}\n{"text": "b"}\n',
    "twice.jsonl": b'{"text": "a", "text": "b", "label": "c"}\n',
    "text.parquet": b"text,label\n",
    "magic.parquet": b"PAR1" + b"\xff" * 100 + b"PAR1",
    "long footer.parquet": b"PAR1" + b"\0" * 20 + struct.pack("<i", 2**31 - 1) + b"PAR1",
    "no suffix": b"text,label\na,b\n",
    "other.xlsx": b"PK\x03\x04",
}
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 2**31 - 1, 2**31 - 1) + b"\x08\x02\0\0\0" + b"\0" * 4
IDX = {
    "empty": b"",
    "header": struct.pack(">IIII", 2051, 4, 28, 28),
    "huge": struct.pack(">IIII", 2051, 2**31 - 1, 28, 28) + bytes(99),
    "magic": struct.pack(">IIII", 1234, 1, 28, 28) + bytes(784),
    "none": struct.pack(">IIII", 2051, 0, 28, 28),
    "flat": struct.pack(">IIII", 2051, 1, 0, 0),
}


def settings(chance):
    """section.key=value for keys that there are and that there are not."""
    plain = recipe.starter("digits").model_dump()
    keys = [f"{section}.{key}" for section, found in plain.items() if isinstance(found, dict) for key in found]
    odd = [
        "x",
        "x.y=1",
        "=",
        "run=",
        "run.=1",
        "train.steps",
        "data.kind.kind=1",
        ".a=1",
        "a.b.c.d.e=1",
        "run.name=\udcff",
    ]
    for number in range(90):
        yield f"{chance.choice(keys)}={VALUES[number % len(VALUES)]}"
    yield from odd


def special(folder):
    """Paths that are no files of data."""
    os.mkfifo(folder / "pipe.csv")
    (folder / "folder.csv").mkdir()
    (folder / "loop.csv").symlink_to("loop.csv")
    (folder / "zeros.csv").symlink_to("/dev/zero")
    os.truncate(os.open(folder / "sparse.jsonl", os.O_CREAT | os.O_RDWR), 1 << 40)
    return [
        "pipe.csv",
        "folder.csv",
        "loop.csv",
        "zeros.csv",
        "nothing.csv",
        "/proc/self/mem",
        "/dev/tty",
        "sparse.jsonl",
    ]


@pytest.fixture
def tried(commands, tmp_path):
    """Answers to many inputs, by kind of input; all of them are told before one is judged."""
    found = []

    def one(kind, name, text, *words, command=("worker",)):
        (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
        answer = commands.answer([*command, "c.yaml", *words], folder=tmp_path, seconds=SECONDS)
        found.append((kind, name, answer))

    yield one
    sys.stdout.write(f"\n{table([(kind, answer) for kind, _, answer in found])}\n")
    bad = [
        f"{kind}: {name!r}: {answer.kind}\n{answer.output[-600:]}" for kind, name, answer in found if not answer.is_good
    ]
    assert not bad, "\n".join(bad)


def test_configs_and_settings(tried):
    chance = random.Random(SEED)
    for text in TEXTS:
        tried("config", text[:40], text, "--dry-run", command=("train",))
    whole = (SMALL + "data: {kind: digits}\nmodel: {kind: cnn}\n").encode()
    for number in range(15):
        tried("damaged config", number, damaged(whole, number, SEED), "--dry-run", command=("train",))
    for setting in settings(chance):
        tried("setting", setting, SMALL, setting, "--dry-run", command=("train",))


@pytest.mark.matrix
def test_files_of_data(tried, tmp_path):
    config = SMALL + "data: {kind: files, train: FILE}\nmodel: {kind: user, file: mine.py}\n"
    (tmp_path / "mine.py").write_text("from torch import nn\ndef build(options, spec): return nn.Linear(2, 2)\n")
    for name, content in BAD_TABLES.items():
        (tmp_path / name).write_bytes(content)
        tried("table", name, config.replace("FILE", json.dumps(name)), command=("data",))
    for name, whole in tables(tmp_path).items():
        for number in range(3):
            (tmp_path / name).write_bytes(damaged(whole, number, SEED))
            tried(f"damaged {name}", number, config.replace("FILE", name), command=("data",))
    for name in special(tmp_path):
        tried("special file", name, config.replace("FILE", name), command=("data",))


@pytest.mark.matrix
def test_images(tried, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    for folder in ("a", "b"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        (tmp_path / "images" / folder / "good.png").write_bytes(whole)
    config = SMALL + "data: {kind: files, train: images}\nmodel: {kind: cnn}\n"
    hostile = [PNG, b"", b"GIF89a", whole[:20], b"\xff\xd8\xff" + bytes(50)]
    for number, content in enumerate([*hostile, *(damaged(whole, number, SEED) for number in range(6))]):
        (tmp_path / "images" / "a" / "bad.png").write_bytes(content)
        tried("image", number, config)
    config = SMALL + "data: {kind: mnist, root: idx}\nmodel: {kind: cnn}\n"
    (tmp_path / "idx").mkdir()
    for name, content in IDX.items():
        for packed in (False, True):
            for file in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
                path = tmp_path / "idx" / f"{file}-ubyte{'.gz' if packed else ''}"
                path.write_bytes(gzip.compress(content) if packed else content)
            tried("IDX", f"{name} {packed}", config, command=("data",))
            for path in (tmp_path / "idx").iterdir():
                path.unlink() if path.is_file() else None
