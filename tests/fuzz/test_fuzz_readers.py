"""Readers of what comes from somebody else, fed by hypothesis: each input ends in a value or in one of our errors.

A target is a few lines: a strategy for its inputs, and a function that reads one in an empty folder.

    @target(damaged(b'{"step": 1}', st.sampled_from([b"NaN", b"9" * 400])))
    def exports(folder, data):
        (folder / "lockstep.json").write_bytes(data)
        export_reader.read(folder)

It runs in a process of its own (`fuzzing.py`): what crashes natively, hangs, eats memory or executes code in the input
fails the test. Every target is tried for LOCKSTEP_FUZZ_SECONDS; `pytest FILE -k NAME -s` says how
many inputs that were. What is in `corpus/TARGET/` is tried first: inputs that have once failed, as hypothesis stores them
in `.hypothesis/readers/TARGET/`, to be copied from there and committed with the fix.
"""

import asyncio
import functools
import io
import itertools
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import datasets
import pyarrow
import pytest
import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase, MultiplexedDatabase, ReadOnlyDatabase
from hypothesis.internal.conjecture import engine
from PIL import Image
from places import ROOT, SUPPORT
from pyarrow import parquet
from rich.console import Console
from served import image_export

from lockstep.base.errors import UserError
from lockstep.base.events import Bus
from lockstep.checkpoint.layout import Manifest
from lockstep.data import tables
from lockstep.data.huggingface import image_of, load_split
from lockstep.inference import trained_model
from lockstep.inference.serving import server
from lockstep.inference.serving.service import ServedModel, Settings, service_of
from lockstep.launch import run_control
from lockstep.observe.report import report_page
from lockstep.observe.report.run_files import read as read_run
from lockstep.observe.sinks import _tracker, jsonl, tensorboard
from lockstep.observe.watch.run_state import RunReader
from lockstep.observe.watch.screen import screen
from lockstep.recipe import recipe
from lockstep.run import api
from lockstep.tools.compare import comparison
from lockstep.tools.gate import gate_diff, gating, golden_file
from lockstep.tools.replay import replay_bundle
from lockstep.tools.sweep import sweep_state, sweep_table
from lockstep.tools.verify import signing, verification
from lockstep.training import steering

SECONDS = float(os.environ.get("LOCKSTEP_FUZZ_SECONDS", "3"))
"""For a target."""
EXAMPLE_SECONDS = 30
"""For one input: on a busy machine, many times what it takes; PyYAML may take a second for a file."""
SHRINK_SECONDS = 20
"""For making an input that fails smaller."""
CORPUS = SUPPORT / "corpus"
FOUND = ROOT / ".hypothesis" / "readers"
KEY = b"input"
TARGETS = {}


def target(inputs):
    """Register a function (folder, input) with the strategy for its inputs."""

    def register(read):
        TARGETS[read.__name__] = (inputs, read)
        return read

    return register


HOSTILE = st.sampled_from(
    b"""NaN -Infinity 1e300 1e999 5e-324 -1 1e15 true null "" "3" "\\ud800" "\\u001b[2J" "../../x" "/dev/zero" [] {} [[1]]
    {"a":{}} \0 \xff\xfe &a[*a] !!python/name:os.system 2024-01-01""".split()
    + [b"9" * 400, b"9" * 5000, b"[" * 9000, b'{"a":' * 9000, b"\n", b"\r\n"]
)
"""In place of a value in JSON or YAML."""


@st.composite
def damaged(draw, seed, tokens=HOSTILE):
    """`seed` (bytes, or a strategy for bytes) with up to three places cut out, repeated or replaced.

    Half of them are whole values: what is between two of `:,[]{}` and line breaks.
    """
    data = draw(seed) if isinstance(seed, st.SearchStrategy) else seed
    for _ in range(draw(st.integers(0, 3))):
        edges = [0, *(i + 1 for i, byte in enumerate(data) if byte in b":,[]{}\n")] if draw(st.booleans()) else None
        spot = st.sampled_from(edges) if edges else st.integers(0, len(data))
        begin = draw(spot)
        end = next((i for i in edges if i > begin), len(data) + 1) - 1 if edges else draw(st.integers(begin, len(data)))
        new = draw(st.one_of(tokens, st.just(b""), st.just(data[begin:end] * 2), st.binary(max_size=8)))
        data = data[:begin] + new + data[end:]
    return data


@st.composite
def folder_of(draw, files):
    """Name -> bytes of a folder, one or two of whose files are damaged."""
    names = draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True))
    return files | {name: draw(damaged(files[name])) for name in names}


def written(folder, files):
    """Make such a folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@contextmanager
def limited(seconds):
    """Raise TimeoutError after so much time."""

    def raise_timeout(*_):
        raise TimeoutError(f"one input took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def session(name, seconds):
    """Try a target for so long, in the current folder. Raises what the reader should not have."""
    inputs, read = TARGETS[name]
    tried, end, place = itertools.count(), time.monotonic() + seconds, Path("input").absolute()
    found, corpus = (DirectoryBasedExampleDatabase(folder / name) for folder in (FOUND, CORPUS))
    database = MultiplexedDatabase(found, ReadOnlyDatabase(corpus))

    def example(given_input):
        next(tried)
        Path("last.txt").write_text(repr(given_input)[:100_000])  # what remains of a crash in native code
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            with limited(EXAMPLE_SECONDS):
                read(place, given_input)
        except UserError as error:
            assert str(error).strip(), "an error without words"

    example.__name__ = name
    engine.MAX_SHRINKING_SECONDS = SHRINK_SECONDS
    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": set(Phase) - {Phase.explain}}
    run = settings(database=database, max_examples=100, **options)(given(given_input=inputs)(example))
    run._hypothesis_internal_database_key = KEY  # not the source of `example`, which may change
    while time.monotonic() < end:
        run()
    sys.stdout.write(f"{name}: {next(tried):,} inputs in {seconds:.0f} s\n")


SWEEP = (
    b'{"keys":[{"key":"optim.lr","values":[0.1,0.2]}],"search":"grid","count":2,"metric":"loss","prune":"none",'
    b'"working_folder":"/","trials":[{"number":1,"settings":{"optim.lr":0.1},"state":"finished","value":0.5,"loss":0.5,'
    b'"seconds":1.5,"digest":"ab","evaluations":[{"step":1,"value":0.5,"loss":0.5}]},{"number":2,"settings":{}}]}'
)


GOLDEN = {
    "kind": "lockstep gate",
    "version": 1,
    "lockstep": "0.1.0",
    "numeric": {"optim.lr": 0.1},
    "digest": "a1",
    "chain": ["b2"],
    "numbers": [{"loss": 2.5, "gradient_norm": None}, {}],
    "lines": [
        {"kind": "weights", "step": 0, "tensors": {"a.weight": "c3"}},
        {"kind": "batch", "step": 0, "samples": [3, 1], "columns": {"image": "d4"}},
        {"kind": "call", "step": 0, "name": "a", "inputs": "e5", "hash": "f6"},
        {"kind": "gradient", "step": 0, "name": "a.weight", "hash": "a7"},
        {"kind": "sum", "step": 0, "tensors": {"a.weight": "b8"}},
        {"kind": "weights", "step": 1, "tensors": {"a.weight": "c9"}},
    ],
}
RECORDED = golden_file.Golden.model_validate({**GOLDEN, "modules": {"a": "a (A, a.py:3)"}})


@target(damaged(json.dumps(GOLDEN, indent=0).encode()))
def golden_files(folder, data):
    """What gate reads and compares, without the checksum that would find each damage."""
    (folder / "golden.json").write_bytes(data)
    golden = golden_file.read(folder / "golden.json")
    gate_diff.difference(golden, RECORDED)
    gate_diff.farthest(golden, RECORDED)
    gating.changes(golden.numeric, RECORDED.numeric)


@target(damaged(SWEEP))
def sweeps(folder, data):
    """What `sweep show` reads and draws."""
    (folder / "sweep.json").write_bytes(data)
    sweep = sweep_state.load(folder)
    sweep_table.print_sweep(sweep, folder, Console(file=io.StringIO()))
    sweep_table.svg(sweep, "title")


HISTORY = [
    *('"started","step":0,"world_size":2,"device":"CPU","total_steps":9,"steps_per_epoch":3',
    '"steps","step":3,"seconds":0.5,"memory_bytes":1000000000',
    '"ranks","step":3,"steps":3,"ranks":[0],"phases":{"data":[0.5],"exchange":[0.1]},"memory_by_rank":[1]',
    '"evaluated","step":3,"seconds":0.1', '"saved","step":3,"seconds":0.1,"stall_seconds":0.1',
    '"texts","step":3,"texts":[["a","b"]]', '"warned","step":3,"message":"slow"',
    '"spiked","step":3,"message":"the loss jumped"', '"started","step":3,"world_size":1', '"steps","step":6,"seconds":0.5', '"ended","step":6,"status":"finished"'),
]  # fmt: skip
RUN = {
    "recipe.yaml": b"run: {name: one, dir: runs}\ndata: {kind: digits, limit: 32}\ntrain: {steps: 9}\n",
    "history.jsonl": "".join(f'{{"time":{1000 + i},"kind":{line}}}\n' for i, line in enumerate(HISTORY)).encode(),
    "metrics.jsonl": b'{"kind":"step","step":3,"epoch":1,"loss":0.5,"learning_rate":0.1,"chain":"ab"}\n'
    b'{"kind":"evaluation","step":3,"epoch":1,"samples":9,"loss":0.5,"accuracy":0.5}\n'
    b'{"kind":"spike","step":4,"loss":9.5,"loss_before":0.5}\n'
    b'{"kind":"step","step":6,"epoch":2,"loss":0.25,"samples_per_second":530.1,"chain":"cd"}\n',
    "summary.json": b'{"status":"finished","world_size":1,"first_step_seconds":5.6,"steps":6,"epochs":0.3,'
    b'"train_samples_per_second":417.1,"evaluation":{"loss":2.2},"labels":["a","b"],"confusion_matrix":[[0,2],[1,3]],'
    b'"chain":"cd","drift":[{"step":3,"field":"x","before":1,"now":2}],"digest":"ab","device":"CPU",'
    b'"numeric_recipe":{"run.seed":0,"data.transforms":[]}}',
    "evaluation.json": b'{"worst":[{"origin":"a","label":"b","predicted":"c","confidence":0.5,"loss":1.5,"image":""}]}',
    "job.json": b'{"kind":"local","recovers_live":false,"host":"vm","process":8449,"began":1795813492.49}',
    "launch.yaml": b"data: {kind: digits}\n",
    "logs/rank-0.log": b"step 3/9 loss 1\n",
    "steering.jsonl": b'{"step":3,"by":"me","stop":true,"factor":0.5}\n',
    "wandb.jsonl": b'"id"\n[3,0]\n',
}


class Noted(_tracker.Tracker):
    """A tracker that keeps what it is sent."""

    name = "wandb"

    def open(self, event, config):
        return "id"

    def log(self, step, values):
        assert all(math.isfinite(value) for value in values.values())

    def end(self, status, summary, files):
        pass


@target(folder_of(RUN))
def run_files(folder, files):
    """What report, watch, compare, the Python API, sinks and a resume read of a run."""
    written(folder, files)
    tracker = Noted(folder)
    tracker._known()
    for read in (
        lambda: report_page.html([read_run(folder)] * 2),
        lambda: Console(file=io.StringIO()).print(screen(RunReader(folder).state(), width=100)),
        lambda: comparison.compare(folder, folder),
        lambda: api.Run(folder).metrics,
        lambda: tensorboard.hyperparameters(folder),
        lambda: tracker._repeat(9),
        lambda: steering.Steering(Bus(), folder / steering.FILE).start(2, repeats=True),
        lambda: jsonl.Jsonl(folder)._drop_after(3),
        lambda: run_control.status(folder),
    ):
        with suppress(UserError):
            read()


@functools.cache
def verified_files():
    """A run with a checkpoint without tensors, a hash chain and a signature, and the key that checks this."""
    progress = {"step": 3, "skipped": 0, "chain": "ab", "drift": [], "scaler": {}}
    best = {"best": None, "evaluations_since": 0}
    facts = {"epoch": 1, "world_size": 1, "saved_at": 1e9, "numeric": {"run.seed": 0}, "digest": "ab"}
    manifest = Manifest(step=3, **facts, progress={**progress, "stopping": best, "saving": best}).after(())
    summary = {"digest": "ab", "checkpoints": [asdict(link) for link in manifest.checkpoints]}
    key = Ed25519PrivateKey.generate()
    signed = summary["checkpoints"][-1]
    signature = {"signed": signed, "signature": key.sign(json.dumps(signed, sort_keys=True).encode()).hex()}
    return {
        "recipe.yaml": RUN["recipe.yaml"],
        "checkpoints/step-000000003/manifest.json": manifest.text().encode(),
        "summary.json": json.dumps(summary).encode(),
        "signature.json": json.dumps(signature).encode(),
        "key.pub": key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    }


@target(st.deferred(lambda: folder_of(verified_files())))
def verified_runs(folder, files):
    """What `verify` reads before it runs anything again."""
    written(folder, files)
    found = verification.read(folder)
    is_whole = files == verified_files()
    problems = [*found.problems(), signing.problem(folder, folder / "key.pub", found.chain)]
    assert not is_whole or problems == [None]
    verification.intervals(found, from_start=True)


def sink(write):
    """The bytes that a function writes into a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


ROWS = pyarrow.table({"text": [f"text {number}" for number in range(20)], "label": ["a", "b"] * 10})
README = b"""---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: "*.jsonl"
dataset_info:
  features:
  - name: text
    dtype: string
  - name: label
    dtype: string
---
"""
DATA = {
    "README.md": README,
    "train.jsonl": b"\n".join(json.dumps(row).encode() for row in ROWS.to_pylist()),
    "dataset_infos.json": b'{"default": {"features": {"text": {"dtype": "string", "_type": "Value"}}}}',
}
PICTURES = {
    "metadata.jsonl": b'{"file_name": "a.png", "text": "a", "label": "b"}\n{"file_name": "a.png", "text": "a", "label": "b"}',
    "a.png": sink(lambda file: Image.new("RGB", (2, 2)).save(file, "PNG")),
}
PARQUET = st.sampled_from(
    [
        sink(lambda file, options=options: parquet.write_table(ROWS, file, **options))
        for options in ({}, {"compression": "zstd"})
    ]
)
NUMBERS = st.sampled_from([number.to_bytes(4, "little", signed=True) for number in (0, -1, 8, 2**30, -(2**31))])


def saved_folder():
    """What save_to_disk writes."""
    with tempfile.TemporaryDirectory() as place:
        datasets.Dataset(ROWS).save_to_disk(place)
        return {file.name: file.read_bytes() for file in Path(place).iterdir()}


def read_rows(folder, files):
    """All rows of a data folder, by the library `datasets`."""
    written(folder / "set", files)
    datasets.config.HF_DATASETS_CACHE = folder / "hf"
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    table = load_split(str(folder / "set"), "train", cache=folder / "cache")
    for row in table:
        image_of(row["image"], str(folder / "set")) if isinstance(row.get("image"), dict) else None


@target(folder_of(DATA))
def data_folders(folder, files):
    read_rows(folder, files)


@target(folder_of(PICTURES))
def picture_folders(folder, files):
    read_rows(folder, files)


SAVED = saved_folder()


@target(folder_of(SAVED))
def saved_tables(folder, files):
    read_rows(folder, files)


@target(damaged(next(data for name, data in SAVED.items() if name.endswith(".arrow")), NUMBERS))
def arrow_tables(folder, data):
    read_rows(folder, {name: data if name.endswith(".arrow") else other for name, other in SAVED.items()})


@target(damaged(PARQUET))
def parquet_tables(folder, data):
    (folder / "a.parquet").write_bytes(data)
    tables.read_columns(folder / "a.parquet", ["text", "label"], lambda *_: None)


@target(damaged(b"run: {name: one}\ndata: {kind: digits, limit: 32}\ntrain: {steps: 2}\nlaunch: {processes: 1}\n"))
def recipes(folder, data):
    """Of a run, in its report and as a config."""
    (folder / "recipe.yaml").write_bytes(data)
    read_run(folder)
    recipe.load(folder / "recipe.yaml")


@functools.cache
def export_files():
    """Of an export with weights of its own kind."""
    with tempfile.TemporaryDirectory() as folder:
        return {path.name: path.read_bytes() for path in image_export(Path(folder, "digits")).iterdir()}


@target(st.deferred(lambda: folder_of(export_files())))
def exports(folder, files):
    """What `serve` and `predict` open, and have predict once."""
    written(folder, files)
    trained_model.loader(folder)()


@functools.cache
def port():
    """Of a server of that export in this process, which waits briefly."""
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), export_files())
        limits = Settings(port=0, timeout_seconds=0.2, body_bytes=4096)
        service = service_of(ServedModel(trained_model.loader(Path(folder)), seconds=60), limits)
    opened = socket.create_server(("127.0.0.1", 0))
    server.handle_signals = lambda *_: None  # only the main thread can
    serving = server._serve(service, opened, report=lambda _: None)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    return opened.getsockname()[1]


LINES = b"""Host: localhost,Host: evil.example,Origin: null,Expect: 100-continue,Content-Length: 9,Content-Length: -1,
Transfer-Encoding: chunked,Content-Type: multipart/form-data; boundary=x,Connection: close,Upgrade: h2c,X: \xff""".split(
    b","
)
REQUEST = b'POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\r\n5\r\n{"ima\r\n0\r\nX: y\r\n\r\n'


@target(damaged(REQUEST * 2, st.sampled_from([line.strip() + b"\r\n" for line in LINES]) | HOSTILE))
def requests(folder, data):
    """What is sent to a server: an answer that is no error of its own, or a closed connection, and soon."""
    with socket.create_connection(("127.0.0.1", port()), timeout=5) as client:
        answer = b""
        with suppress(ConnectionError):
            client.sendall(data)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in answer


BUNDLE = (
    b'{"recipe":"data: {kind: digits}","spec":{"modality":"image","labels":["a"]},"total_steps":9,"seed":1,"scale":1,"numeric":{},'
    b'"shards":[{"step":1,"shard":0,"indices":[1],"shards":2,"weights":null,"term_counts":{}}],"trace":[{"kind":"call"}]}'
)
TENSORS = safetensors.torch.save({"a": torch.zeros(2), "b": torch.ones(1, dtype=torch.int64)})


@target(st.one_of(st.tuples(damaged(BUNDLE), damaged(TENSORS)), st.binary(max_size=64)))
def bundles(folder, found):
    """What lockstep replay reads of a bundle."""
    file = folder / "one.replay"
    if isinstance(found, bytes):
        file.write_bytes(found)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in zip(("replay.json", "weights.safetensors"), found, strict=True):
                archive.writestr(name, content)
    facts = replay_bundle.facts_of(file)
    recipe.parse(facts.recipe, file="one.replay")
    replay_bundle.tensors_of(file, "weights")


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("name", TARGETS)
def test_reader(commands, tmp_path, name):
    answer = commands.answer(session, name, SECONDS, folder=tmp_path, seconds=SECONDS + 60)
    last = tmp_path / "last.txt"
    assert answer.kind == "done", (
        f"{answer.output[:2000]}\n...\n{answer.output[-8000:]}\nlast input: {last.read_text()[:2000] if last.exists() else None}"
    )
    sys.stdout.write(answer.output)
