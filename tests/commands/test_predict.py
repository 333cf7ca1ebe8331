"""`lockstep predict`: the same bytes for any number of processes, through kills and signals; what cannot be predicted."""

import gzip
import json
import math
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
import warm
from filelock import FileLock
from PIL import Image
from pyarrow import csv, parquet
from running import left_of
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.cli import _app
from lockstep.data.collate import collate
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_writer import export
from lockstep.inference.predict import worker_pool
from lockstep.inference.predict.input_rows import CHUNK_ROWS, PredictionInput
from lockstep.inference.trained_model import open_predictor
from lockstep.models import _transformer as transformer
from lockstep.models import _user as user
from lockstep.recipe.export_config import ExportSection

LABELS = ("World", "Sports", "Sci/Tech")
NETWORK = """
import os
import pathlib
import time

import torch

SLOW = pathlib.Path(__file__).with_name("slow")


class Brightness(torch.nn.Module):
    '''Dark, middling or bright; dies of an image that is white, and takes its time where there is a file `slow`.'''

    def __init__(self):
        super().__init__()
        self.level = torch.nn.Parameter(torch.tensor([-0.1, 0.0, 0.1]))

    def forward(self, batch):
        light = batch["image"].flatten(1).float().mean(1, keepdim=True) / 255
        if (light == 1).any():
            os.kill(os.getpid(), 9)
        if SLOW.exists():
            time.sleep(0.1)
        return (light - 0.31) * self.level * 500


def build(options, spec):
    return Brightness()
"""


def exported(model, section, spec, folder, **more):
    facts = export_facts.facts_of(
        section, spec, name="small", kind="", step=1, digest=f"{1:064}", metrics={}, recipe={"data": {"kind": "files"}}
    )
    batch = more.pop("batch")
    export(model, folder, section=ExportSection(), facts=facts, first=[batch], every=list, **more)
    return folder


@pytest.fixture(scope="module")
def texts_model(minilm, tmp_path_factory):
    """A very small BERT with weights that mean nothing, behind a real tokenizer."""
    from transformers import BertConfig, BertModel

    small = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=30522, initializer_range=2.0, **sizes)).save_pretrained(small)
    tokenizer = transformer.tokenizer(transformer.Config(kind="transformer", name=str(minilm)))
    tokenizer.save(small)
    section = transformer.Config(kind="transformer", name=str(small))
    spec = DataSpec(modality="text", labels=LABELS)
    batch = collate({"input_ids": tokenizer(["one", "another one"])}, 0)
    target = small.parent / "texts"
    return exported(transformer.build(section, spec), section, spec, target, batch=batch, write_more=tokenizer.save)


@pytest.fixture(scope="module")
def images_model(tmp_path_factory):
    """A network of the user's own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "net.py").write_text(NETWORK)
    trust.own(trust.code_with_imports(folder / "net.py"))
    section = user.Config(kind="user", file=folder / "net.py")
    spec = DataSpec(modality="image", labels=("dark", "middling", "bright"), image_shape=(1, 8, 8))

    def beside(target):
        (target / "net.py").write_text(NETWORK)

    batch = {"image": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}
    return exported(user.build(section, spec), section, spec, folder / "images", batch=batch, write_more=beside)


@pytest.fixture(scope="module")
def words():
    """Texts of 1 to 60 words."""
    generator = np.random.default_rng(0)
    known = np.array(["bank", "goal", "chip,", "war", "match", "profit", "star", "software", "team", "price"])
    return [" ".join(generator.choice(known, generator.integers(1, 60))) for _ in range(2 * CHUNK_ROWS + 300)]


@pytest.fixture(scope="module")
def table(words):
    return pa.table({"id": [f"{i:05}" for i in range(len(words))], "text": words, "": [""] * len(words)})


@pytest.fixture(scope="module", autouse=True)
def prepared(ranks):
    """What all processes need is imported once for all of these tests, whoever has started processes before."""
    ranks.close()  # else the fork server would not end before them
    forkserver._forkserver._stop()
    multiprocessing.set_forkserver_preload([*worker_pool.PRELOADED, *worker_pool.PRELOADED_FOR_TEXTS])
    forkserver.ensure_running()


@pytest.fixture
def predict(tmp_path, monkeypatch):
    """Runs the command in a folder of its own -> what it says; the exit code has to be the one that is expected."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")  # which the command sets

    def run(*arguments, code=0):
        result = CliRunner().invoke(_app.app, ["predict", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_the_same_bytes_for_any_number_of_processes(predict, texts_model, words, table):
    csv.write_csv(table, "in.csv")
    for processes in (1, 3):
        command = (texts_model, "in.csv", "--out", f"{processes}.parquet", "--probabilities", "--processes", processes)
        assert f"{len(words):,} rows written" in predict(*command)
    assert len({Path(f"{processes}.parquet").read_bytes() for processes in (1, 3)}) == 1
    assert not [name for name in os.listdir() if name.endswith(".parts") or "tmp" in name]
    found = parquet.read_table("1.parquet")
    assert found.select(table.column_names).equals(table)
    assert found.schema.field("confidence").type == pa.float32()
    predictor = open_predictor(texts_model)
    each = np.concatenate([predictor.scores(predictor.encode([text])) for text in words[:40]])
    assert found["label"].to_pylist()[:40] == [LABELS[best] for best in each.argmax(1)]
    assert len(set(found["label"].to_pylist())) == 3
    columns = np.stack([found[f"probability_{label}"].to_numpy() for label in LABELS], axis=1)
    np.testing.assert_allclose(columns[:40], each, atol=1e-5)
    assert (found["confidence"].to_numpy() == columns.max(1)).all()


def test_a_few_rows_start_no_process(predict, texts_model, images_model, photos, table, monkeypatch):
    """With the same bytes; and the columns are looked at before a process is started."""
    csv.write_csv(table.slice(0, 100), "in.csv")
    for file in sorted(photos.rglob("*.png"))[30:]:
        file.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(PredictionInput, "is_short", lambda _: False)
        predict(texts_model, "in.csv", "--out", "texts.parquet")
        predict(images_model, photos, "--out", "images.parquet")
    monkeypatch.setattr(worker_pool.WorkerPool, "start_worker", None)
    assert "100 rows written" in predict(texts_model, "in.csv", "--out", "texts-here.parquet")
    predict(images_model, photos, "--out", "images-here.parquet")
    for kind in ("texts", "images"):
        assert Path(f"{kind}.parquet").read_bytes() == Path(f"{kind}-here.parquet").read_bytes()
    csv.write_csv(table.rename_columns(["id", "body", ""]), "long.csv")
    assert "has no column 'text'" in predict(texts_model, "long.csv", "--out", "out.csv", code=2)
    sorted(photos.rglob("*.png"))[3].write_bytes(b"none")
    assert "cannot be read as an image" in predict(images_model, photos, "--out", "out.csv", code=2)
    assert not Path("out.csv.parts").exists()


@pytest.mark.core
def test_every_form_is_read_and_written(predict, texts_model, words, table):
    few = table.slice(0, 50).rename_columns(["id", "body", "rest"])
    views = few.set_column(1, "body", few["body"].cast(pa.string_view()))  # as polars writes texts
    parquet.write_table(views, "in.parquet", row_group_size=7)
    csv.write_csv(few, "in.tsv", csv.WriteOptions(delimiter="\t"))
    Path("in.jsonl").write_text("\n\n".join(map(json.dumps, few.to_pylist())))
    Path("in.txt").write_text("\n".join(words[:50]))
    for form in ("parquet", "tsv", "jsonl"):
        predict(texts_model, f"in.{form}", "--out", f"{form}.csv", "--text-column", "body", "--processes", 1)
    predict(texts_model, "in.txt", "--out", "txt.jsonl", "--text-column", "body")
    assert Path("parquet.csv").read_text() == Path("tsv.csv").read_text() == Path("jsonl.csv").read_text()
    texts = csv.ConvertOptions(column_types={"id": pa.string()})
    rows = csv.read_csv("parquet.csv", convert_options=texts).to_pylist()
    lines = [json.loads(line) for line in Path("txt.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == few["id"].to_pylist()
    assert [(row["body"], row["label"]) for row in rows] == [(line["body"], line["label"]) for line in lines]
    assert [line["confidence"] for line in lines] == pytest.approx([row["confidence"] for row in rows], rel=1e-6)


def test_other_columns_of_json_lines_leave_as_they_came(predict, texts_model):
    """Also where a key comes late, and numbers are whole at first."""
    rows = [
        {"text": "a bank", "n": i, "tags": ["x", {"y": None}][:1], "note": "caf\u00e9"} for i in range(CHUNK_ROWS + 1)
    ]
    rows[-1] |= {"n": 2.5, "late": {"deep": [1]}}
    Path("in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for out in ("out.jsonl", "out.parquet"):
        predict(texts_model, "in.jsonl", "--out", out)
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    kept = [{name: row[name] for name in row if name not in ("label", "confidence")} for row in found]
    assert list(map(json.dumps, kept)) == list(map(json.dumps, rows))  # 1 is not 1.0, no key is filled in
    assert [row["late"] for row in parquet.read_table("out.parquet").to_pylist()][-1] == {"deep": [1]}
    assert "column 'tags' of the input is list" in " ".join(
        predict(texts_model, "in.jsonl", "--out", "out.csv", code=2).split()
    )


def test_rows_of_json_may_hold_anything(predict, texts_model):
    """Whatever mixture their values are, in JSON lines, in a list, and compressed; a column that is there already is
    told."""
    odd = [1, 1.0, "1", None, math.nan, True, 2**70, {}, {"k": [1, "a"]}, [[], [1, {"z": None}]], "\u2028"]
    rows = [{"text": f"a bank {n}", "x": value} for n, value in enumerate(odd)]
    lines, listed = "\n".join(map(json.dumps, rows)), json.dumps(rows, indent=2)
    written = {"a.jsonl": lines, "b.json": listed, "c.json": lines, "d.jsonl.gz": lines, "e.json.gz": listed}
    for name, text in written.items():
        Path(name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        predict(texts_model, name, "--out", "out.jsonl")
        found = [json.loads(line) for line in Path("out.jsonl").read_text().split("\n") if line]
        assert all(row.pop("label") and row.pop("confidence") > 0 for row in found)
        assert list(map(json.dumps, found)) == list(map(json.dumps, rows)), name
    Path("f.csv.gz").write_bytes(gzip.compress(b"text;n\na bank;007\n"))
    predict(texts_model, "f.csv.gz", "--out", "out.csv")
    assert Path("out.csv").read_text().splitlines()[1].startswith('"a bank","007"')
    Path("h.txt.gz").write_bytes(gzip.compress(b"a bank\na goal\n"))
    predict(texts_model, "h.txt.gz", "--out", "out.csv")
    assert [line.partition(",")[0] for line in Path("out.csv").read_text().splitlines()[1:]] == ['"a bank"', '"a goal"']
    Path("g.jsonl").write_text('{"text": "a", "label": 1}\n')
    said = " ".join(predict(texts_model, "g.jsonl", "--out", "out.jsonl", code=2).split())
    assert "g.jsonl has a column 'label' already" in said


def test_values_of_any_type_are_written_or_refused_at_once(predict, texts_model):
    """Not after hours of predicting, at the write of the output, again and again; NaN is none of JSON."""
    only_parquet = {
        "far": pa.array([10**9], pa.date32()),
        "zone": pa.array([1], pa.timestamp("us", "No/Where")),
        "deep": pa.array([[b"\xff"]]),
    }
    plain = {"nan": pa.array([[1.0, math.nan]]), "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))}
    plain |= {"at": pa.array([[10**18 + 1]], pa.list_(pa.timestamp("ns")))}
    for name, column in only_parquet.items():
        parquet.write_table(pa.table({"text": ["a bank"], name: column}), "in.parquet")
        predict(texts_model, "in.parquet", "--out", "out.parquet")
        said = " ".join(predict(texts_model, "in.parquet", "--out", "out.jsonl", code=2).split())
        assert f"column {name!r} of the input holds what .jsonl cannot hold" in said
        assert not Path("out.jsonl.parts").exists()
    parquet.write_table(pa.table({"text": ["a bank"], **plain}), "in.parquet")
    predict(texts_model, "in.parquet", "--out", "out.jsonl")
    row = json.loads(Path("out.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (row["nan"], row["map"], row["at"]) == ([1.0, None], [["a", 1]], ["2001-09-09 01:46:40.000000001"])


@pytest.fixture
def photos(tmp_path):
    """Real digits, some deep, a few more than a chunk holds; and what is no image."""
    folder = tmp_path / "photos"
    images = (load_digits().images * 15).astype(np.uint8)[: CHUNK_ROWS + 40]
    for number, image in enumerate(images):
        file = folder / str(number % 3) / "deeper" / f"{number:04}.png" if number % 3 else folder / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_folder_of_images(predict, images_model, photos):
    predict(images_model, photos, "--out", "out.parquet", "--processes", 2, "--prefix", "predicted_")
    found = parquet.read_table("out.parquet").to_pydict()
    files = sorted(file.relative_to(photos).parts for file in photos.rglob("*.png"))
    assert found["file"] == ["/".join(parts) for parts in files]
    light = [np.asarray(Image.open(photos / file)).mean() / 255 for file in found["file"]]
    assert found["predicted_label"] == ["bright" if each > 0.31 else "dark" for each in light]
    assert set(found) == {"file", "predicted_label", "predicted_confidence"}


def test_an_image_that_is_none_is_named_and_the_rest_is_kept(predict, images_model, photos):
    bad = sorted(photos.rglob("*.png"))[-1]
    whole = bad.read_bytes()
    bad.write_bytes(whole[:70])
    said = predict(images_model, photos, "--out", "out.csv", "--processes", 1, code=2)
    assert str(bad) in said and "cannot be read as an image" in said
    assert "1 chunk is done and kept in out.csv.parts: the same command goes on" in said
    bad.write_bytes(whole)
    assert "resuming: 1 of 2 chunks are done" in predict(images_model, photos, "--out", "out.csv")
    assert len(Path("out.csv").read_text().splitlines()) == CHUNK_ROWS + 41


def test_rows_that_kill_are_told_of(predict, images_model, photos):
    Image.new("L", (8, 8), 255).save(photos / "3.png")
    said = predict(images_model, photos, "--out", "out.csv", "--processes", 2, code=5)
    assert said.count("was killed by SIGKILL: another one takes its place") == 2
    assert f"was killed by SIGKILL in the rows from {CHUNK_ROWS + 1} on" in said
    (photos / "3.png").unlink()
    predict(images_model, photos, "--out", "out.csv")


# ---- ended in the middle


def begun(*command):
    """`lockstep predict` in a terminal of its own, when it has done something -> it, and the processes that predict."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = warm.Popen(["lockstep", "predict", *command], start_new_session=True, **pipes)
    before = set(Path().glob("*.parts/*.parquet"))
    while set(Path().glob("*.parts/*.parquet")) <= before:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    return process, [each for each in family if not each.children() and "resource_tracker" not in str(each.cmdline())]


@contextmanager
def asked_to_end_soon():
    """SIGTERM for this process, as soon as another chunk is done."""
    before, over = set(Path().glob("*.parts/*.parquet")), threading.Event()

    def ask():
        while not over.wait(0.01):
            if set(Path().glob("*.parts/*.parquet")) > before:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.matrix
def test_an_ended_command_goes_on(predict, images_model, photos):
    """It leaves no process behind, and `no_leaks` looks for them; a process of it that is killed is replaced."""
    slow, out, say = images_model / "slow", Path("out.parquet"), "done and kept in out.parquet.parts"
    for number in range(6 * CHUNK_ROWS):
        (photos / f"x{number}.png").symlink_to("0000.png")
    out.write_text("the one before")
    slow.touch()
    process, workers = begun(images_model, photos, "--out", out, "--processes", 2)
    assert len(workers) == 2
    workers[0].kill()
    while "a process was killed by SIGKILL: another one takes its place" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and say in said, said
    assert "Traceback" not in said and "Warning" not in said
    assert not left_of(workers, 10)

    process, workers = begun(images_model, photos, "--out", out, "--processes", 2)
    process.kill()
    assert "resuming: " in process.communicate(timeout=60)[0]
    assert not left_of(workers, 10)

    with asked_to_end_soon():
        assert say in predict(images_model, photos, "--out", out, code=75)
    assert out.read_text() == "the one before"
    slow.unlink()
    assert "resuming: " in predict(images_model, photos, "--out", out, "--processes", 3)
    predict(images_model, photos, "--out", "again.parquet", "--processes", 1)
    assert out.read_bytes() == Path("again.parquet").read_bytes()
    assert {name for name in os.listdir() if "out" in name} == {"out.parquet"}


def test_what_is_kept_fits_or_is_done_anew(predict, texts_model, images_model, photos, words):
    sorted(photos.rglob("*.png"))[-1].write_bytes(b"none")

    def go_on(*more):
        return predict(images_model, photos, "--out", "out.csv", "--processes", 1, *more, code=2)

    assert "resuming" not in go_on()
    assert "resuming: 1 of 2 chunks are done" in go_on()
    assert "starting anew: what out.csv.parts holds was made with another batch" in go_on("--batch", 32)
    assert "was made with another dtype, batch" in go_on("--dtype", "bf16")
    os.utime(photos / "0003.png")
    assert "starting anew: what out.csv.parts holds was made of another input" in go_on("--dtype", "bf16")
    Path("out.csv.parts/mine.txt").touch()
    assert "holds mine.txt: move it away" in " ".join(go_on().split())


# ---- what cannot be predicted


def test_wrong_inputs(predict, texts_model, images_model, photos):
    def said(source, *more, model=images_model, out="out.parquet"):
        return " ".join(predict(model, source, "--out", out, *more, code=2).split())

    Path("in.csv").write_text("text,label\na,b\n")
    Path("folder").mkdir()
    assert "there is no file or folder none.csv" in said("none.csv")
    assert "has a column 'label' already: rename it there" in said("in.csv", model=texts_model)
    assert "folder has no images in it" in said("folder")
    Path("folder/gone.png").symlink_to("nowhere.png")
    assert "folder/gone.png cannot be read" in said("folder")
    assert "takes images, but in.csv holds texts" in said("in.csv")
    assert "takes texts, but" in said(photos, model=texts_model)
    assert "folder is no run, no checkpoint and no export" in said("in.csv", model="folder")
    assert "in.csv is the input" in said("in.csv", out="./in.csv")
    assert "no form that can be written: end --out in .parquet, .csv, .jsonl" in said("in.csv", out="out.xlsx")
    assert "folder.csv is a folder" in said("in.csv", out=Path("folder").rename("folder.csv"))
    assert "there is no folder far to write out.csv to" in said("in.csv", out="far/out.csv")
    if not torch.cuda.is_available():
        assert "no GPU" in said("in.csv", "--device", "cuda")
    with FileLock(Path("out.parquet.parts").mkdir() or "out.parquet.parts/.lock"):
        assert "another command has out.parquet.parts" in said("in.csv")
    assert not [name for name in os.listdir() if name.endswith(".parts") and os.listdir(name) != [".lock"]]
