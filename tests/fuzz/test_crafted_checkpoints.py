"""Checkpoints that somebody else has written, each under a manifest that is right: nothing in them is executed."""

import io
import json
import os
import shutil
import zipfile

import pytest
import torch
from crafting import CANARY, pickled, sealed
from written_checkpoints import save

from lockstep.checkpoint import layout, reader, tensor_table, verify
from lockstep.training import resume

PROGRESS = {
    "step": 3,
    "skipped": 0,
    "chain": "",
    "drift": [],
    "scaler": {},
    "stopping": {"best": None, "evaluations_since": 0},
    "saving": {"best": float("nan"), "evaluations_since": 2},
}
TENSORS = {"model.weight": torch.arange(12.0).reshape(3, 4), "model.steps": torch.tensor(7)}


def write(root):
    for step in (1, 3):
        progress = PROGRESS | {"step": step}
        save(
            root,
            TENSORS,
            layout.Manifest(step=step, epoch=1, world_size=1, saved_at=0.0, numeric={}, progress=progress),
        )


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    ranks(1, write, root)
    return root


@pytest.fixture
def root(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield shutil.copytree(saved, tmp_path / "checkpoints")
    assert not (tmp_path / CANARY).exists(), "code in a file was executed"


@pytest.fixture
def newest(root):
    return root / "step-000000003"


def test_what_was_saved_can_be_resumed(newest):
    assert resume.problem(newest) is None
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    reader.load(newest, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def table_of(folder):
    return json.loads((folder / tensor_table.FILE).read_bytes())


def edited(change):
    def edit(folder):
        found = table_of(folder)
        change(found)
        return json.dumps(found).encode()

    return edit


DTYPE, SHAPE, CHUNKS = range(3)
OFFSET, SIZE, FILE, START, LENGTH = range(5)


def chunk(part, value, name="model.weight"):
    """Give a tensor's first chunk another value."""

    def change(found):
        found[name][CHUNKS][0][part] = value

    return edited(change)


def tensor(part, value):
    def change(found):
        found["model.weight"][part] = value

    return edited(change)


def terabytes(found):
    found["model.weight"][SHAPE] = found["model.weight"][CHUNKS][0][SIZE] = [3 << 40, 4]


def shared(found):
    one, other = (each[CHUNKS][0] for each in found.values())
    other[FILE], other[START] = one[FILE], one[START]


def twice(found):
    found["model.weight"][CHUNKS] *= 2


def flat(text):
    return lambda _: text


TABLES = {
    "shell": flat(pickled()),
    "nested lists": flat(b"[" * 100_000 + b"]" * 100_000),
    "nested objects": flat(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "nothing": flat(b""),
    "text": flat(b"hello"),
    "a number": flat(b"3"),
    "a list": flat(b"[]"),
    "no lists": flat(b'{"model.weight": {}}'),
    "a number of 4,000 digits": chunk(START, 10**4000),
    "another folder's file": chunk(FILE, "../step-000000001/__0_0.distcp"),
    "an absolute file": chunk(FILE, "/etc/passwd"),
    "a file that is not there": chunk(FILE, "missing"),
    "terabytes": edited(terabytes),
    "terabytes of nothing": tensor(SHAPE, [1 << 40, 1 << 40]),
    "many axes": tensor(SHAPE, [1] * 65),
    "a negative size": tensor(SHAPE, [-3, -4]),
    "a fraction": tensor(SHAPE, [3.0, 4]),
    "true": tensor(SHAPE, [True, 4]),
    "another dtype": tensor(DTYPE, "float63"),
    "a dtype that is none": tensor(DTYPE, "load"),
    "beyond the end": chunk(LENGTH, 1 << 50),
    "before the start": chunk(START, -1),
    "outside": chunk(OFFSET, [1, 0]),
    "other axes": chunk(OFFSET, [0]),
    "no chunks": tensor(CHUNKS, []),
    "a chunk twice": edited(twice),
    "shared bytes": edited(shared),
    "more fields": tensor(CHUNKS, [[1]]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_crafted_table_is_passed_over(root, newest, name):
    text = TABLES[name](newest)
    (newest / tensor_table.FILE).write_bytes(text)
    sealed(newest)
    problem = verify.problem(newest)
    assert problem.startswith("cannot be read: tensors.json "), problem
    assert len(problem) < 300 and "\n" not in problem
    told = []
    assert verify.newest(root, lambda *facts: told.append(facts), problem=resume.problem) == root / "step-000000001"
    assert told == [(newest, problem)]
    with pytest.raises(reader.DamagedError):
        reader.load(newest, {name: tensor.clone() for name, tensor in TENSORS.items()})


def replaced(folder, part):
    """Give the first tensor of a checkpoint other bytes, and its table the right place of them."""
    found = table_of(folder)
    place = found["model.weight"][CHUNKS][0]
    file = folder / place[FILE]
    place[START], place[LENGTH] = file.stat().st_size, len(part)
    with file.open("ab") as parts:
        parts.write(part)
    (folder / tensor_table.FILE).write_text(json.dumps(found))
    sealed(folder)


def test_the_pickle_beside_the_table_is_never_read(newest):
    (newest / tensor_table.OF_TORCH).write_bytes(pickled())
    sealed(newest)
    assert resume.problem(newest) is None
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    reader.load(newest, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_checkpoint_of_an_earlier_version_is_named(newest):
    (newest / tensor_table.FILE).unlink()
    sealed(newest)
    assert "a version of Lockstep before this one has written it" in verify.problem(newest)
    with pytest.raises(reader.DamagedError, match="a version of Lockstep before this one"):
        reader.load(newest, {name: tensor.clone() for name, tensor in TENSORS.items()})


def archive(kind=zipfile.ZIP_STORED, **parts):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as written:
        for name, content in {"data.pkl": pickled(), "version": b"3\n", **parts}.items():
            written.writestr(f"archive/{name}", content)
    return file.getvalue()


PARTS = {
    "a pickle": pickled().ljust(200, b"\0"),
    "an archive with a pickle": archive(),
    "a compressed archive": archive(zipfile.ZIP_DEFLATED, **{"data/0": bytes(50_000_000)}),
    "noise": os.urandom(300),
}


@pytest.mark.parametrize("name", PARTS)
def test_crafted_bytes_of_a_tensor_are_not_executed(newest, name):
    replaced(newest, PARTS[name])
    assert verify.problem(newest) is None  # all is as the table says; only reading it shows what it is
    with pytest.raises(reader.DamagedError, match="step-000000003 cannot be read"):
        reader.load(newest, {name: tensor.clone() for name, tensor in TENSORS.items()})


MANIFESTS = {
    "empty progress": {"progress": {}},
    "progress as a list": {"progress": []},
    "progress as a text": {"progress": "x"},
    "a step of -5": {"step": -5},
    "a step of 1e9": {"step": 10**9},
    "a step as text": {"step": "3"},
    "a step as a fraction": {"step": 3.5},
    "a step without end": {"step": 10**30},
    "a step that is true": {"step": True},
    "numeric as a list": {"numeric": []},
    "files as a list": {"files": []},
    "files of numbers": {"files": {"__0_0.distcp": 3}},
    "a negative size": {"files": {"__0_0.distcp": [-1, ""]}},
    "a file elsewhere": {"files": {"../../x": [1, ""]}},
    "an absolute file": {"files": {"/etc/passwd": [1, ""]}},
    "metrics of texts": {"metrics": {"accuracy": "high"}},
    "a digest that is none": {"digest": 7},
    "no processes": {"world_size": 0},
    "more fields": {"more": 1},
    "progress of another step": {"progress": {**PROGRESS, "step": 2}},
    "progress before the first step": {"progress": {**PROGRESS, "step": -1}},
    "skipped as text": {"progress": {**PROGRESS, "skipped": "none"}},
    "a chain that is a number": {"progress": {**PROGRESS, "chain": 5}},
    "a long chain": {"progress": {**PROGRESS, "chain": "a" * 200}},
    "drift that is none": {"progress": {**PROGRESS, "drift": [3]}},
    "a record that is none": {"progress": {**PROGRESS, "stopping": {"best": 1.0, "evaluations_since": 0, "x": 1}}},
    "a scaler that is none": {"progress": {**PROGRESS, "scaler": {"scale": -1.0}}},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_edited_manifest_is_passed_over(root, newest, name):
    sealed(newest, **MANIFESTS[name])
    problem = resume.problem(newest)
    assert problem and len(problem) < 300 and "\n" not in problem, problem
    assert verify.newest(root, lambda *_: None, problem=resume.problem) == root / "step-000000001"


def nest(folder):
    (folder / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)


def nest_validly(folder):
    deep = "1"
    for _ in range(150):
        deep = f'{{"a": {deep}}}'
    sealed(folder, numeric=json.loads(deep))


def fifo(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def fifo_beside(folder):
    (folder / tensor_table.FILE).unlink()
    os.mkfifo(folder / tensor_table.FILE)


def device(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("/dev/zero")


def loop(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("manifest.json")


def as_folder(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def large(folder):
    os.truncate(folder / "manifest.json", 1 << 40)


def part_as_folder(folder):
    part = next(folder.glob("*.distcp"))
    part.unlink()
    part.mkdir()


@pytest.mark.parametrize(
    "damage", [nest, fifo, fifo_beside, device, loop, as_folder, large, part_as_folder], ids=lambda f: f.__name__
)
def test_other_things_than_files_are_passed_over(root, newest, damage):
    damage(newest)
    assert verify.newest(root, lambda *_: None, problem=resume.problem) == root / "step-000000001"


def test_a_manifest_nested_deep_but_readable_is_one(newest):
    nest_validly(newest)
    assert resume.problem(newest) is None
