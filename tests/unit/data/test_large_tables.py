"""Tables larger than memory: their texts are copied once into the cache, and mapped; the samples are the same."""

import json
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet
from table_files import complaint, files_config, write_table

from lockstep.data import text_table
from lockstep.data.columns import MappedTexts
from lockstep.data.sources import _files as files
from lockstep.data.sources import _hub, hub

ROWS = [(f'text {n}, "quoted"\né' * (n % 5), f"{n % 3}") for n in range(1, 9000)]
LABELS = {"class": "2", "classes": ["a", "b"], "number": 2.5, "tags": ["X", "Y"]}


@pytest.fixture
def large(monkeypatch):
    """Whether tables count as large from now on."""
    return lambda is_large: monkeypatch.setattr(text_table, "LARGE_BYTES", -1 if is_large else 1 << 40)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_number_that_float32_cannot_hold_is_told(tmp_path, large, is_large):
    large(is_large)
    table = write_table(tmp_path / "a.csv", [("a", "3e38"), ("b", "-1e300"), ("c", "1")])
    said = complaint(files.build, files_config(table, labels="number", cache=tmp_path / "cache"), "train")
    assert "row 2 of" in said and "the label '-1e300', beyond what float32 can hold, 3.4e+38" in said


def content(source):
    found = source.__getitems__(range(len(source)))
    return found["text"], [label.tolist() for label in found["label"]], source.spec


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_the_samples_of_a_large_table_are_the_same(tmp_path, large, suffix):
    config = files_config(write_table(tmp_path / f"a{suffix}", ROWS), cache=tmp_path / "cache")
    found = {}
    for is_large in (False, True):
        large(is_large)
        splits = [files.build(config, split) for split in ("train", "test")]
        assert [isinstance(each.texts, MappedTexts) for each in splits] == [is_large] * 2
        found[is_large] = [content(each) for each in splits]
    assert found[True] == found[False]


@pytest.mark.parametrize("labels", list(LABELS))
def test_labels_of_any_kind_and_odd_texts(tmp_path, large, labels):
    path = tmp_path / "a.jsonl"
    rows = [{"text": text, "label": LABELS[labels]} for text in ("new york", "\ud800 ok", "lime \u00e9")]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = files_config(path, test=path, labels=labels, cache=tmp_path / "cache")
    large(False)
    expected = content(files.build(config, "train"))
    large(True)
    assert content(files.build(config, "train")) == expected


def test_a_table_is_copied_once_and_again_where_it_or_the_copy_has_changed(tmp_path, large):
    large(True)
    config = files_config(write_table(tmp_path / "a.parquet", ROWS), cache=tmp_path / "cache")

    def copies():
        files.build(config, "train")
        return {file: file.stat().st_mtime_ns for file in (tmp_path / "cache/tables").glob("*.arrow")}

    first = copies()
    assert len(first) == 1
    assert copies() == first
    (file,) = first
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    assert copies().keys() == first.keys()
    assert file.read_bytes() == whole
    write_table(config.train, [*ROWS, ("new", "0")])
    assert len(copies()) == 2


def test_a_bad_row_of_a_large_table_is_named_and_leaves_no_copy(tmp_path, large):
    large(True)
    path = write_table(tmp_path / "a.csv", [*ROWS, ("text", "")])
    message = complaint(files.build, files_config(path, cache=tmp_path / "cache"))
    assert f"row {len(ROWS) + 1} of {path} has no label" in message
    assert not [*(tmp_path / "cache/tables").glob("*.arrow*")]


def test_a_large_table_takes_no_memory(tmp_path):
    """60 MB of texts, of which at most a batch and its Arrow table are held."""
    path, batch = tmp_path / "a.parquet", ["word " * 400] * 1000
    schema = pyarrow.schema([("text", pyarrow.string()), ("label", pyarrow.string())])
    with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for number in range(30):
            labels = [str(number % 3)] * 1000
            writer.write_table(pyarrow.table({"text": batch, "label": labels}, schema=schema))
    assert path.stat().st_size > text_table.LARGE_BYTES
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        source = files.build(files_config(path, cache=tmp_path / "cache"), "train")
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.__getitems__([5])["text"] == batch[:1]
    assert held < 5e6
    assert most < 35e6
    assert pool.bytes_allocated() - before < 1e6


@pytest.mark.parametrize("splits", [("train", "test"), ("train[10%:]", "train[:10%]")])
def test_texts_of_a_large_data_set_of_the_hub_stay_where_they_are(tmp_path, large, splits, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("train", "test"):
        write_table(tmp_path / f"set/{name}.parquet", [(f"{name} {n}", n % 3) for n in range(500)])
    names = {"train_split": splits[0], "test_split": splits[1]}
    config = hub.Config(kind="hub", name=str(tmp_path / "set"), text_column="text", **names)
    found = {}
    for is_large in (False, True):
        monkeypatch.setattr(_hub, "LARGE_BYTES", -1 if is_large else 1 << 40)
        built = [_hub.build(config, split) for split in ("train", "test")]
        assert [isinstance(each.texts, MappedTexts) for each in built] == [is_large] * 2
        found[is_large] = [content(each) for each in built]
    assert found[True] == found[False]
