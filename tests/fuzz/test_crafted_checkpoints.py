"""Checkpoints that somebody else has written, each under a manifest that is right: nothing in them is executed."""

import io
import json
import os
import pickle
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from crafting import CANARY, Shell, pickled, sealed
from written_checkpoints import save

from lockstep.checkpoint import dcp_metadata, layout, reader, verify
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


def metadata(folder):
    return dcp.FileSystemReader(folder).read_metadata()


def edited(change):
    def edit(folder):
        found = metadata(folder)
        change(found)
        return pickle.dumps(found)

    return edit


def other_file(name):
    def change(found):
        for place in found.storage_data.values():
            place.relative_path = name

    return change


def terabytes(found):
    entry = found.state_dict_metadata["model.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([3 << 40, 4])


def beyond(found):
    next(iter(found.storage_data.values())).length = 1 << 50


def transformed(found):
    next(iter(found.storage_data.values())).transform_descriptors = ["zstd"]


def bytes_entry(found):
    found.state_dict_metadata["model.weight"] = dcp.BytesStorageMetadata()


def outside(found):
    found.state_dict_metadata["model.weight"].chunks[0].offsets = torch.Size([1, 0])


def shared(found):
    one, other = list(found.storage_data.values())[:2]
    other.relative_path, other.offset = one.relative_path, one.offset


def no_places(found):
    found.storage_data = {}


def shell_inside(found):
    found.planner_data = Shell()


def flat(text):
    return lambda _: text


TABLES = {
    "shell": flat(pickled()),
    "shell of protocol 0": flat(pickled(0)),
    "shell of protocol 5": flat(pickled(5)),
    "shell inside": edited(shell_inside),
    "a builtin": flat(b"cbuiltins\neval\n(S'1'\ntR."),
    "torch.load": flat(b"ctorch\nload\n(S'x'\ntR."),
    "torch.hub": flat(b"\x80\x04\x8c\ttorch.hub\x94\x8c\x04load\x93\x8c\x01x\x85R."),
    "a getattr chain": flat(b"\x80\x04\x8c\x05torch\x8c\x0ehub.os.getcwd()\x93."),
    "an extension": flat(b"\x80\x02\x82\x01."),
    "a persistent id": flat(b"Px\n."),
    "a huge memo": flat(b"\x80\x04Nr\xff\xff\xff\xff."),
    "a huge string": flat(b"\x80\x04X\xff\xff\xff\x7fa."),
    "a huge number": flat(b"\x80\x04\x8b\xff\xff\xff\x7f\x00."),
    "nested lists": flat(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."),
    "nothing": flat(b""),
    "text": flat(b"hello"),
    "a number": flat(pickle.dumps(3)),
    "a dict": flat(pickle.dumps({"state_dict_metadata": {}})),
    "another object": flat(pickle.dumps(torch.Size([3]))),
    "another folder's file": edited(other_file("../step-000000001/__0_0.distcp")),
    "an absolute file": edited(other_file("/etc/passwd")),
    "the table itself": edited(other_file("missing")),
    "terabytes": edited(terabytes),
    "beyond the end": edited(beyond),
    "a transformation": edited(transformed),
    "bytes": edited(bytes_entry),
    "outside": edited(outside),
    "no places": edited(no_places),
    "shared bytes": edited(shared),
    "a key of tuples without end": flat(b"\x80\x04})" + b"\x85" * 300_000 + b"Ns."),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_crafted_table_is_passed_over(root, newest, name):
    text = TABLES[name](newest)
    (newest / dcp_metadata.FILE).write_bytes(text)
    sealed(newest)
    problem = verify.problem(newest)
    assert problem.startswith("cannot be read: .metadata "), problem
    assert len(problem) < 300 and "\n" not in problem
    told = []
    assert verify.newest(root, lambda *facts: told.append(facts), problem=resume.problem) == root / "step-000000001"
    assert told == [(newest, problem)]
    with pytest.raises(reader.DamagedError):
        reader.load(newest, {name: tensor.clone() for name, tensor in TENSORS.items()})


def replaced(folder, part):
    """Give the first tensor of a checkpoint other bytes, and its table the right place of them."""
    found = metadata(folder)
    place = next(place for index, place in found.storage_data.items() if index.fqn == "model.weight")
    file = folder / place.relative_path
    place.offset, place.length = file.stat().st_size, len(part)
    with file.open("ab") as parts:
        parts.write(part)
    (folder / dcp_metadata.FILE).write_bytes(pickle.dumps(found))
    sealed(folder)


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
    (folder / dcp_metadata.FILE).unlink()
    os.mkfifo(folder / dcp_metadata.FILE)


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
