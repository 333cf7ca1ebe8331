"""Data folders and weights from somebody else: only files inside them are opened, whole ones, of bounded size."""

import gzip
import io
import json
import lzma
import os
import socket
import tarfile
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from crafting import archived
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file

from lockstep.base.errors import ConfigError, DataError, UserError
from lockstep.core.host.pretrained_files import check_folder
from lockstep.data import tables
from lockstep.data.own_files import read_class_folders
from lockstep.data.sources import _files, _hub, _text, files, hub
from lockstep.data.sources.text import Config, text_files
from lockstep.data.text_tokenizers import Bytes
from lockstep.data.token_cache import tokenized
from lockstep.inference.predict.input_rows import open_input
from lockstep.observe.report import run_files
from lockstep.recipe.warm_start import warm_start

ROWS = [f"row {number}" for number in range(20)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def folder(tmp_path):
    """A data folder, beside a private file."""
    lines = "\n".join(json.dumps({"text": text, "label": "a"}) for text in ROWS)
    (tmp_path / "private.jsonl").write_text(lines.replace("row", "secret"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_text(lines)
    return tmp_path / "set"


def texts(folder, column="text"):
    settings = {"name": str(folder), "text_column": column, "test_split": "train", "cache": folder.parent / "cache"}
    source = _text.build(Config(kind="text", **settings), "train")
    return [text[:-1] for text in source.__getitems__(range(len(source)))["text"]]


def told(folder):
    """The message about a data folder, which has one line."""
    with pytest.raises(DataError) as caught:
        texts(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def described(folder, front):
    (folder / "README.md").write_text(f"---\n{front}\n---\nA data set.\n")


NAMES = {
    "a step up": "../private.jsonl",
    "absolute": "{}/private.jsonl",
    "a step up below": "x/../../private.jsonl",
    "in a list": "[train.jsonl, ../private.jsonl]",
    "in a split": "[{{split: train, path: [train.jsonl, '{}/private.jsonl']}}]",
    "a URL": "file://{}/private.jsonl",
    "a chain": "json://private.jsonl::{}/private.zip",
    "home": "~/private.jsonl",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_what_a_readme_names_lies_in_its_folder(folder, name, file):
    """In a config that is not asked for, too."""
    given = NAMES[name].format(folder.parent)
    described(folder, f"configs:\n- config_name: a\n  data_files: train.jsonl\n- config_name: b\n  data_files: {given}")
    if file != "README.md":
        front = (folder / "README.md").read_text().split("---\n")[1]
        (folder / "README.md").rename(folder / file).write_text(front)
    message = told(folder)
    assert f"{folder / file} names " in message and "what a folder names has to lie inside it" in message


def test_no_url_of_a_readme_is_fetched(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"http://127.0.0.1:{server.getsockname()[1]}/x.jsonl"
        described(folder, f"configs:\n- config_name: default\n  data_files: [train.jsonl, '{place}']")
        assert f"names '{place}'" in told(folder)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_ordinary_settings_of_a_readme_are_read(folder):
    (folder / "more").mkdir()
    (folder / "more/x.tsv").write_text("text\nbad\n")
    (folder / "more/x.csv").write_text("text::label\none::1\n" * 2)
    options = 'data_files: "more/*.csv"\n  sep: "::"\n  engine: python\ndate: 2024-01-01'
    described(folder, f"configs:\n- config_name: default\n  {options}")
    table = hub.Config(kind="hub", name=str(folder), text_column="text", test_split="train", cache=folder.parent / "c")
    assert _hub.build(table, "train").texts[0] == "one"


def linked(folder, target):
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl").symlink_to(target)


def test_links_lead_out_of_a_folder_only_in_the_cache_of_the_hub(folder):
    outside = f"train.jsonl leads to {folder.parent}/private.jsonl, outside of {folder}"
    linked(folder, "../private.jsonl")
    assert outside in told(folder) and "cp -rL" in told(folder)
    cache = folder.parent / "datasets--x--y"
    (cache / "blobs").mkdir(parents=True)
    (folder.parent / "private.jsonl").rename(cache / "blobs/1234")
    (cache / "snapshots/abc").mkdir(parents=True)
    (cache / "snapshots/abc/train.jsonl").symlink_to("../../blobs/1234")
    assert len(texts(cache / "snapshots/abc")) == 20


@pytest.fixture
def saved(tmp_path):
    """Folders that save_to_disk has written."""
    for name, text in (("saved", "abcdefgh"), ("private", "secret")):
        table = datasets.Dataset.from_dict({"text": [text] * 1000, "more": ["private"] * 1000})
        table.save_to_disk(tmp_path / name)
        datasets.DatasetDict(train=table).save_to_disk(tmp_path / f"{name}-splits")
    return tmp_path / "saved"


def edited(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("start", ["..", "{}"])
def test_what_save_to_disk_names_lies_in_its_folder(saved, start):
    start, file = start.format(saved.parent), "data-00000-of-00001.arrow"
    edited(saved / "state.json", _data_files=[{"filename": f"{start}/private/{file}"}])
    assert f"private/{file}, outside of {saved}" in told(saved)
    splits = saved.parent / "saved-splits"
    edited(splits / "dataset_dict.json", splits=[f"{start}/private-splits/train"])
    assert f"outside of {splits}" in told(splits)
    edited(splits / "dataset_dict.json", splits=["train"])
    (splits / "train" / file).unlink()
    (splits / "train" / file).symlink_to(saved.parent / "private" / file)
    assert f"outside of {splits}" in told(splits)


def offsets(change, values=1000, width=8):
    """Other offsets of the texts in an Arrow file."""
    before = (np.arange(values + 1) * width).astype(np.int32)

    def changed(content):
        after = before.copy()
        change(after)
        return content.replace(before.tobytes(), after.astype(np.int32).tobytes(), 1)

    return changed


def moved(rows, by):
    def change(values):
        values[rows] += by

    return change


DAMAGES = {
    "far": offsets(moved(slice(500, None), 1 << 30)),
    "the next column": offsets(moved(slice(999, None), 6000)),
    "negative": offsets(moved(slice(3, 4), -(1 << 20))),
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
}


def last(folder):
    try:
        print(texts(Path(folder))[-1])  # noqa: T201
    except UserError as error:
        print(error)  # noqa: T201
        return 2
    return 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_arrow_is_a_message(commands, saved, damage):
    file = next(saved.glob("*.arrow"))
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    answer = commands.answer(last, str(saved), folder=saved.parent)
    assert answer.kind == "message" and f"{file} cannot be read as arrow: " in answer.output, answer


@pytest.mark.parametrize(
    "column",
    [
        pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int32()), ["a", "b"], safe=False),
        pa.ListArray.from_buffers(
            pa.list_(pa.string()), 2, [None, pa.py_buffer(np.array([0, 9, 1], np.int32))], children=[pa.array(["a"])]
        ),
        pa.Array.from_buffers(
            pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff")]
        ),
    ],
    ids=["dictionary", "list", "no UTF-8"],
)
def test_arrow_of_a_data_folder_is_validated(folder, column):
    (folder / "train.jsonl").unlink()
    with (
        pa.OSFile(str(folder / "train.arrow"), "wb") as out,
        pa.ipc.new_stream(out, pa.schema({"x": column.type})) as to,
    ):
        to.write_batch(pa.RecordBatch.from_arrays([column], ["x"]))
    assert f"{folder}/train.arrow cannot be read as arrow: In column 0" in told(folder)


def test_whole_files_are_read_once(saved):
    assert len(texts(saved)) == 1000
    (known,) = (saved.parent / "cache/checked").iterdir()
    before = known.stat().st_mtime_ns
    assert len(texts(saved)) == 1000 and known.stat().st_mtime_ns == before
    file = next(saved.glob("*.arrow"))
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    with file.open("r+b") as opened:
        content = opened.read()
        opened.seek(0)
        opened.write(DAMAGES["far"](content))
    os.utime(file, ns=times)  # as unpacking another archive would set them
    assert "cannot be read as arrow" in told(saved)


def test_damaged_caches_are_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(_files.text_table, "LARGE_BYTES", 10)
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"abcdefgh,{n % 2}\n" for n in range(1000)))
    config = files.Config(kind="files", train=tmp_path / "a.csv", cache=tmp_path / "cache")
    source = _files.build(config, "train")
    first, expected = tokenized(source, Bytes(), tmp_path / "cache").ids.tolist(), [*source.texts]
    (file,) = (tmp_path / "cache/tables").glob("*.arrow")
    before = (np.arange(1001) * 8).astype(np.int64)
    content = file.read_bytes()
    assert before.tobytes() in content
    file.unlink()  # it is mapped into memory
    file.write_bytes(content.replace(before.tobytes(), (before + (1 << 40)).tobytes()))
    assert [*_files.build(config, "train").texts] == expected
    (file,) = (tmp_path / "cache/tokens").glob("*/offsets.npy")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-8] + np.int64(1 << 40).tobytes())
    assert tokenized(source, Bytes(), tmp_path / "cache").ids.tolist() == first


def repeated(file, text, rows, **options):
    """A small Parquet file with a large text in each row."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), [text])
    parquet.write_table(pa.table({"text": column, "label": column}), file, store_schema=False, **options)


def as_tar(path):
    with tarfile.open(path, "w:xz") as archive:
        entry = tarfile.TarInfo("1.txt")
        entry.size = 1 << 22
        archive.addfile(entry, io.BytesIO(bytes(1 << 22)))


def as_zip(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.jsonl", b" " * (1 << 22))


def with_the_end_of_a_zip(path):
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    path.write_bytes(gzip.compress(b" " * (1 << 22)) + gzip.compress(empty.getvalue(), compresslevel=0))
    assert zipfile.is_zipfile(path)


def nested(path):
    column = pa.ListArray.from_arrays(pa.array([0, 1 << 19], pa.int32()), pa.array([7] * (1 << 19), pa.int8()))
    parquet.write_table(pa.table({"text": ["a"], "label": column}), path)


BOMBS = {
    "train.jsonl.gz": lambda path: path.write_bytes(gzip.compress(b" " * (1 << 22))),
    "train.jsonl.xz": lambda path: path.write_bytes(lzma.compress(b" " * (1 << 22))),
    "train.jsonl": lambda path: path.write_bytes(gzip.compress(b" " * (1 << 22))),
    "both.jsonl.gz": with_the_end_of_a_zip,
    "train.zip": as_zip,
    "train.tar": as_tar,
    "train.parquet": lambda path: repeated(path, "x" * 1000, 3000),
    "plain.parquet": lambda path: repeated(path, "x" * 1000, 3000, use_dictionary=False, compression="zstd"),
    "nested.parquet": nested,
}


@pytest.fixture
def low_limits(monkeypatch):
    monkeypatch.setattr(tables, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(tables, "MOST_TIMES", 10)


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_becomes_no_large_one(folder, low_limits, name):
    (folder / "train.jsonl").unlink()
    BOMBS[name](folder / name)
    assert f"{folder / name} has " in told(folder) and "becomes more than 1,048,576" in told(folder)


@pytest.mark.parametrize("start", [b"Rar!\x1a\x07\x01\x00", b"7z\xbc\xaf\x27\x1c\x00\x04"])
def test_an_archive_whose_size_nobody_can_tell_is_not_unpacked(folder, start):
    (folder / "train.jsonl").write_bytes(start + bytes(100))
    assert f"{folder}/train.jsonl is a RAR or 7z archive" in told(folder)


@pytest.mark.parametrize("name", [name for name in BOMBS if name.endswith(".parquet")])
def test_rows_of_parquet_do_not_fill_the_memory(folder, low_limits, name):
    path, held = folder / name, 0
    BOMBS[name](path)
    with pytest.raises(DataError, match=r"becomes more than 1,048,576 \(10 times its size"):
        for batch in tables.parquet_batches(path, lambda *_: None, columns=["text", "label"]):
            held = max(held, batch.nbytes)
    assert held <= 1 << 18
    with pytest.raises(DataError, match="becomes more than"):
        tables.read_columns(path, ["text", "label"], lambda *_: None)


def test_columns_of_parquet_are_the_same_in_any_encoding(tmp_path):
    rows = [f"text {number % 7} " * (number % 90) for number in range(3000)]
    for number, options in enumerate(
        [{}, {"use_dictionary": False}, {"data_page_size": 64}, {"data_page_version": "2.0", "compression": "gzip"}]
        + [{"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}, {"row_group_size": 100}]
    ):
        parquet.write_table(pa.table({"text": rows, "text.x": rows}), tmp_path / f"{number}.parquet", **options)
        found = tables.read_columns(tmp_path / f"{number}.parquet", ["text.x", "text"], lambda *_: None)
        assert found == [rows, rows]


def test_cells_name_no_images_outside(folder):
    (folder / "train.jsonl").unlink()
    Image.new("RGB", (8, 8)).save(folder / "own.png")
    Image.new("RGB", (8, 8)).save(folder.parent / "private.png")
    kinds = datasets.Features(image=datasets.Image(decode=False), label=datasets.ClassLabel(names=["a", "b"]))
    for place in (folder / "own.png", folder.parent / "private.png", "http://127.0.0.1:9/x.png"):
        cells = {"image": [{"path": str(place), "bytes": None}] * 4, "label": [0, 1] * 2}
        parquet.write_table(pa.table(cells, schema=kinds.arrow_schema), folder / "train.parquet")
        names = {"name": str(folder), "train_split": "train", "test_split": "train"}
        config = hub.Config(kind="hub", image_column="image", cache=folder.parent / "cache", **names)
        if place == folder / "own.png":
            assert _hub.build(config, "train").images.shape == (4, 3, 8, 8)
        else:
            with pytest.raises(DataError, match=f"outside of {folder}"):
                _hub.build(config, "train")
            text = hub.Config(kind="hub", text_column="image", cache=folder.parent / "cache", **names)
            with pytest.raises(DataError, match="for a text"):
                _hub.build(text, "train")


def test_class_folders_and_texts_hold_no_links_outside(tmp_path):
    (tmp_path / "set/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "set/cat/1.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "private.png")
    (tmp_path / "set/cat/2.png").symlink_to("1.png")
    assert len(read_class_folders(tmp_path / "set", "image").samples) == 2
    (tmp_path / "private.txt").write_text("secret")
    for link, target in {"set/cat/3.png": "private.png", "set/dog": ".", "set/4.txt": "private.txt"}.items():
        (tmp_path / link).symlink_to(tmp_path / target)
        with pytest.raises(DataError, match=f"outside of {tmp_path}/set: "):
            if link.endswith(".txt"):
                text_files(tmp_path / "set")
            else:
                read_class_folders(tmp_path / "set", "image")
        if link != "set/4.txt":
            (tmp_path / link).unlink()
    (tmp_path / "set/3.png").symlink_to(tmp_path / "private.png")
    with pytest.raises(DataError, match=f"outside of {tmp_path}/set: "):
        list(open_input(tmp_path / "set", "text").chunks())


def refused_weights(path):
    with pytest.raises(UserError) as caught:
        warm_start(torch.nn.Linear(2, 2), path)
    return str(caught.value)


@pytest.mark.timeout(30)
def test_weights_are_regular_files_of_bounded_size(tmp_path):
    good, compressed = io.BytesIO(), tmp_path / "small.pt"
    torch.save({"weight": torch.zeros(1 << 20)}, good)
    with zipfile.ZipFile(good) as parts, zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as out:
        for name in parts.namelist():
            out.writestr(name, parts.read(name))
    assert "it holds compressed parts, which torch.save does not write" in refused_weights(compressed)
    archived(tmp_path / "code.pt")
    assert "cannot be read as a state dict without executing code" in refused_weights(tmp_path / "code.pt")
    old = tmp_path / "old.pt"
    torch.save({"weight": torch.ones(2, 2)}, old, _use_new_zipfile_serialization=False)
    assert warm_start(torch.nn.Linear(2, 2), old).notes[0].startswith("model.init: 1 of")
    for name in ("a.safetensors", "a.pt"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / name)
        assert "it is a pipe, not a regular file" in refused_weights(tmp_path / name)
        (tmp_path / name / name).unlink()
        (tmp_path / name / name).symlink_to("/dev/zero")
        assert "it is a device" in refused_weights(tmp_path / name)
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "b.safetensors")
    (tmp_path / "link.safetensors").symlink_to("b.safetensors")  # named by the user
    assert warm_start(torch.nn.Linear(2, 2), tmp_path / "link.safetensors").notes[0].startswith("model.init: 1 of")


@pytest.mark.timeout(30)
def test_the_files_of_a_model_lie_in_its_folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "private.safetensors").write_bytes(b"")
    index = tmp_path / "model/model.safetensors.index.json"
    for name in ("../private.safetensors", f"{tmp_path}/private.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": name}}))
        with pytest.raises(DataError, match=f"private.safetensors, outside of {tmp_path}/model"):
            check_folder(tmp_path / "model")
    index.unlink()
    (tmp_path / "model/a.safetensors").symlink_to("../private.safetensors")
    with pytest.raises(DataError, match=f"private.safetensors, outside of {tmp_path}/model"):
        check_folder(tmp_path / "model")
    (tmp_path / "model/a.safetensors").unlink()
    os.mkfifo(tmp_path / "model/a.safetensors")
    with pytest.raises(DataError, match="a.safetensors cannot be read: it is a pipe"):
        check_folder(tmp_path / "model")
    (tmp_path / "model/a.safetensors").unlink()
    for content in ("{", "[]", '{"weight_map": {"a": 3}}'):
        index.write_text(content)
        with pytest.raises(DataError, match="index.json cannot be read"):
            check_folder(tmp_path / "model")


@pytest.mark.timeout(30)
def test_pipes_in_place_of_files_are_refused_at_once(folder):
    os.mkfifo(folder / ".huggingface.yaml")
    assert "it is a pipe, not a regular file" in told(folder)
    for name in ("a.jsonl", "a.csv", "a.txt", "a.parquet"):
        os.mkfifo(folder / name)
        with pytest.raises(DataError, match="is a pipe or a device"):
            open_input(folder / name, "text")


LAUGHS = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    + [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefg", "bcdefgh", strict=True)]
)


@pytest.mark.timeout(30)
def test_aliases_do_not_multiply(folder):
    described(folder, f"{LAUGHS}\nconfigs:\n- config_name: default\n  data_files: {{x: *h}}")
    assert "README.md holds aliases (*), or more than 60 levels: write them out" in told(folder)
    for front in ("[" * 500_000, "- " * 50_000):
        described(folder, front)
        assert "or more than 60 levels" in told(folder)
    (folder / "recipe.yaml").write_text(f"train: 1\n{LAUGHS}")
    with pytest.raises(ConfigError, match="holds more than 20,000 values once its aliases"):
        run_files.read(folder)


def test_lines_that_are_no_objects_are_refused(folder):
    """pyarrow's reader ended the process with a segmentation fault."""
    rows = [json.dumps({"text": f"text {number}", "label": "a"}) for number in range(20)]
    (folder / "train.jsonl").write_text("\n".join([f"null{rows[0]}", *rows[1:]]))
    assert "train.jsonl, line 1: each line of such a file is an object" in told(folder)
