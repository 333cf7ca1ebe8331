"""A resume sees that the data, the names of its classes or a module of the user's has changed, and not where it lies."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from training_runs import config_in, run_on_rank

from lockstep.base import trust
from lockstep.recipe import recipe as recipes
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import open_splits

SOURCE = """
import os

import numpy as np
from lockstep import DataSpec
import helper


class Rows:
    lengths, spec = None, DataSpec(modality="rows", labels=("0", "1"))

    def __init__(self, file):
        self.x = np.loadtxt(file, ndmin=2).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, rows):
        if helper.NOISY == "gone":
            os._exit(1)
        noise = np.random.default_rng() if helper.NOISY else np.random  # Lockstep seeds the latter
        return {"x": self.x[list(rows)] + noise.random(), "label": np.zeros(len(rows), dtype=np.int64)}


def source(options, split):
    return Rows(options["file"])
"""


def pictures(folder):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(folder / name / f"{number:02}.png")
    return {"kind": "files", "train": folder}


def table(folder):
    folder.mkdir()
    rows = [f"text {n},{'yes' if n % 3 else 'no'}" for n in range(60)]
    (folder / "a.csv").write_text("\n".join(["text,label", *rows]))
    return {"kind": "files", "train": folder / "a.csv"}


def parquet(folder):
    folder.mkdir()
    rows = {"text": [f"text {n}" for n in range(60)], "label": [n % 2 for n in range(60)]}
    pq.write_table(pa.table(rows), folder / "a.parquet")
    return {"kind": "files", "train": folder / "a.parquet"}


def texts(folder):
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("".join(f"{name} says {n}\n" for n in range(3000)))
    return {"kind": "text", "train": folder, "context": 32}


def saved(folder):
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"text {n}" for n in range(60)], "label": [n % 2 for n in range(60)]}
    datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name in ("train", "test")}).save_to_disk(folder)
    return {"kind": "hub", "name": str(folder), "text_column": "text"}


def sounds(folder):
    soundfile = pytest.importorskip("soundfile")
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            wave = np.random.default_rng(number).normal(size=4000).astype(np.float32) * 0.1
            soundfile.write(folder / name / f"{number}.wav", wave, 8000)
    return {"kind": "audio", "train": folder}


def own(folder):
    folder.mkdir()
    (folder / "source.py").write_text(SOURCE)
    (folder / "helper.py").write_text("NOISY = False\n")
    np.savetxt(folder / "rows.txt", np.arange(120).reshape(60, 2))
    trust.own(trust.code_with_imports(folder / "source.py"))
    return {"kind": "user", "file": folder / "source.py", "options": {"file": str(folder / "rows.txt")}}


KINDS = {each.__name__: each for each in (pictures, table, parquet, texts, saved, sounds, own)}


def sums(data, cache, warn=pytest.fail, **settings):
    """What a resume compares of the samples."""
    model = {"kind": "gpt"} if data["kind"] == "text" else {"kind": "cnn"}
    recipe = Recipe.model_validate({"data": {**data, "cache": cache, **settings}, "model": model})
    found = open_splits(recipes._with_defaults(recipe)).numeric(warn)
    return {name: found[name] for name in found if name in ("data.classes", "data.contents", "data.contents_full")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_elsewhere_is_the_same_data(tmp_path, kind):
    """It has other times, and lies in another folder."""
    before = sums(KINDS[kind](tmp_path / "one"), tmp_path / "cache")
    assert before["data.contents"]
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for file in (tmp_path / "two").rglob("*"):
        os.utime(file, (1, 1))
    shutil.rmtree(tmp_path / "one")
    data = json.loads(json.dumps(KINDS[kind](tmp_path / "three"), default=str).replace("three", "two"))
    trust.own(trust.code_with_imports(tmp_path / "two" / "source.py"))
    assert sums(data, tmp_path / "cache") == before == sums(data, tmp_path / "cache", workers=2)


def edit(file, old, new):
    file.write_text(file.read_text().replace(old, new))


def swap(one, two):
    for source, target in ((one, "x"), (two, one), ("x", two)):
        shutil.move(source, target)


def rewrite(file, column, row, value):
    rows = pq.read_table(file).to_pydict()
    rows[column][row] = value
    pq.write_table(pa.table(rows), file)


CHANGES = {
    "a pixel": ("pictures", lambda data: Image.new("L", (6, 6)).save(data / "a" / "11.png")),
    "two files of two classes": ("pictures", lambda data: swap(data / "a" / "00.png", data / "b" / "00.png")),
    "a class that is moved": ("pictures", lambda data: shutil.move(data / "a", data / "c")),
    "a class that stays in its place": ("pictures", lambda data: shutil.move(data / "b", data / "c")),
    "one label": ("table", lambda data: edit(data / "a.csv", "text 7,yes", "text 7,no")),
    "one text": ("table", lambda data: edit(data / "a.csv", "text 7,yes", "text 8,yes")),
    "the order of rows": (
        "table",
        lambda data: edit(data / "a.csv", "text 1,yes\ntext 2,yes", "text 2,yes\ntext 1,yes"),
    ),
    "a label in Parquet": ("parquet", lambda data: rewrite(data / "a.parquet", "label", 7, 0)),
    "one letter": ("texts", lambda data: edit(data / "a.txt", "a says 777\n", "a said 777\n")),
    "a sound": ("sounds", lambda data: shutil.copy(data / "a" / "1.wav", data / "a" / "0.wav")),
    "its name": ("sounds", lambda data: shutil.move(data / "a", data / "z")),
    "a number": ("own", lambda data: edit(data / "rows.txt", "1.000000000000000000e+02", "1.000000000000000001e+09")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    kind, change = CHANGES[what]
    data = KINDS[kind](tmp_path / "data")
    before = sums(data, tmp_path / "cache")
    change(tmp_path / "data")
    assert sums(data, tmp_path / "cache") != before


def test_full_reads_all_of_a_users_samples(tmp_path):
    data = own(tmp_path / "data")
    rows = np.arange(2000).reshape(1000, 2)
    np.savetxt(tmp_path / "data" / "rows.txt", rows)
    before = sums(data, tmp_path, fingerprint="full")
    rows[1, 0] = 999
    np.savetxt(tmp_path / "data" / "rows.txt", rows)
    after = sums(data, tmp_path, fingerprint="full")
    assert before["data.contents"] == after["data.contents"]  # of 64 samples, and not this one
    assert before["data.contents_full"] != after["data.contents_full"]


def test_a_source_that_draws_its_own_numbers_has_no_sum(tmp_path):
    """It could never be resumed."""
    data = own(tmp_path / "data")
    (tmp_path / "data" / "helper.py").write_text("NOISY = True\n")
    trust.own(trust.code_with_imports(tmp_path / "data" / "source.py"))
    said = []
    assert sums(data, tmp_path, warn=said.append, fingerprint="full") == {"data.classes": ["0", "1"]}
    assert said == [
        "the training samples differ each time they are fetched: draw from numpy.random, which is seeded; a resume "
        "will not notice where samples have changed"
    ]


def test_a_sum_that_cannot_be_made_is_told(tmp_path):
    data, said = own(tmp_path / "data"), []
    (tmp_path / "data" / "helper.py").write_text("NOISY = 'gone'\n")
    trust.own(trust.code_with_imports(tmp_path / "data" / "source.py"))
    assert sums(data, tmp_path, workers=1, warn=said.append) == {"data.classes": ["0", "1"]}
    (line,) = said
    assert line.startswith("the training samples could not be fetched for a sum (RuntimeError: DataLoader worker ")
    assert line.endswith("; a resume will not notice where samples have changed")


def test_a_resume_names_what_has_changed(ranks, tmp_path):
    (tmp_path / "augment.py").write_text("import parts.helper\n\ndef augment(sample):\n    return sample\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "helper.py").write_text("SCALE = 1\n")
    data = {**pictures(tmp_path / "data"), "limit": None, "augment": str(tmp_path / "augment.py")}
    config = config_in(tmp_path, "a", data={**data, "train": str(data["train"])})
    ranks(1, _trusting, str(tmp_path / "augment.py"), config, "auto", 2)
    shutil.move(tmp_path / "data" / "a", tmp_path / "data" / "c")
    (tmp_path / "parts" / "helper.py").write_text("SCALE = 2\n")
    for message in ranks(2, _trusting, str(tmp_path / "augment.py"), config):
        assert "data.classes: ['a', 'b'] in the checkpoint, ['b', 'c'] now" in message
        assert "data.contents: the training samples, their labels or their order have changed" in message
        assert "data.augment: what this file imports has changed (parts/helper.py)" in message
        assert "--allow-drift" in message
    assert ranks(1, _trusting, str(tmp_path / "augment.py"), config, "auto", None, True)[0]["status"] == "finished"


def _trusting(file, *arguments):
    trust.own(trust.code_with_imports(Path(file)))
    return run_on_rank(*arguments)
