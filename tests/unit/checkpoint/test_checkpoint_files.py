"""Checkpoints on disk: any damage is noticed, a failed save leaves nothing, and the good ones are never deleted."""

import os
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from written_checkpoints import manifest_of, names, save_all, step_names, tensors_of

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import layout, reader, retention, verify
from lockstep.checkpoint.layout import CheckpointSection


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Real checkpoints of two processes after steps 10, 20, 30, 40: to be copied, not touched."""
    root = tmp_path_factory.mktemp("saved")
    metrics = [{"accuracy": 0.9, "loss": 0.4}, {"accuracy": 0.8, "loss": 0.3}, {}, {"accuracy": 0.7, "loss": 0.5}]
    ranks(2, save_all, root, (10, 20, 30, 40), metrics)
    return root


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


# ---- damage


def flip(folder, chance):
    file = chance.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    file.write_bytes(data)


def truncate(folder, chance):
    file = chance.choice(sorted(folder.iterdir()))
    os.truncate(file, chance.randrange(file.stat().st_size))


def extend(folder, chance):
    with chance.choice(sorted(folder.iterdir())).open("ab") as file:
        file.write(chance.choice([b"\0", b"\n", b" "]))


def remove(folder, chance):
    chance.choice(sorted(folder.iterdir())).unlink()


def add(folder, chance):
    (folder / f"more-{chance.randrange(9)}").write_text("")


def swap(folder, chance):
    files = [file for file in sorted(folder.iterdir()) if file.suffix == ".distcp"]
    files[0].rename(folder / "between")
    files[1].rename(files[0])
    (folder / "between").rename(files[1])


def test_an_untouched_checkpoint_has_no_problem(saved):
    for folder in layout.listed(saved):
        assert verify.problem(folder) is None
    assert len(list((saved / "step-000000040").iterdir())) == 5  # a part per rank, the table, DCP's own, the manifest


@pytest.mark.parametrize("number", range(40))
@pytest.mark.parametrize("damage", [flip, truncate, extend, remove, add, swap], ids=lambda f: f.__name__)
def test_any_damage_is_noticed_and_passed_over(root, number, damage):
    folder, told = root / "step-000000040", []
    damage(folder, random.Random(number))
    problem = verify.problem(folder)
    assert problem
    assert "\n" not in problem
    assert verify.newest(root, lambda *facts: told.append(facts)) == root / "step-000000030"
    has_manifest = (folder / "manifest.json").exists()  # without one the folder does not exist
    assert told == ([(folder, problem)] if has_manifest else [])


@pytest.mark.parametrize("text", ["", "{}", "[]", "12", "null", '{"step": 3}', '{"step": 3, "sha256": "x"}', "{"])
def test_a_manifest_of_another_kind_is_a_problem(root, text):
    (root / "step-000000040" / "manifest.json").write_text(text)
    assert verify.problem(root / "step-000000040").startswith("cannot be read: ")


def test_the_manifest_comes_back_as_it_was(saved):
    manifest = layout.read_manifest(saved / "step-000000020")
    assert (manifest.step, manifest.metrics) == (20, {"accuracy": 0.8, "loss": 0.3})
    assert manifest.numeric == manifest_of(20).numeric
    assert set(manifest.files) == {".metadata", "__0_0.distcp", "__1_0.distcp", "tensors.json"}


def test_newest_goes_on_until_one_is_whole_and_says_why_not(root):
    chance, told = random.Random(0), []
    add(root / "step-000000040", chance)
    os.truncate(root / "step-000000030" / "__0_0.distcp", 10)
    data = (root / "step-000000020" / "__1_0.distcp").read_bytes()
    (root / "step-000000020" / "__1_0.distcp").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = verify.newest(root, lambda folder, reason: told.append(f"{folder.name}: {reason}"))
    assert found == root / "step-000000010"
    assert [line.split("(")[0] for line in told] == [
        f"step-000000040: files missing or added: more-{random.Random(0).randrange(9)}",
        f"step-000000030: __0_0.distcp has 10 bytes instead of {len((root / 'step-000000010' / '__0_0.distcp').read_bytes())}",
        "step-000000020: __1_0.distcp has been changed ",
    ]
    (root / "step-000000010" / ".metadata").unlink()
    assert verify.newest(root, lambda *_: None) is None
    assert verify.newest(root / "nowhere", lambda *_: None) is None


def test_order_is_by_step_and_other_names_are_none(root):
    for name in ("step-9999999999", "step-1", "step-", "step-x", "step-000000050.tmp-ab12cd34", "step-\u00b2", "other"):
        shutil.copytree(root / "step-000000010", root / name)
    assert [f.name for f in layout.listed(root)] == ["step-9999999999", *step_names(40, 30, 20, 10), "step-1"]


# ---- keeping


def section(keep=1, best=None):
    return CheckpointSection(keep=keep, best=best)


@pytest.mark.parametrize(
    ("keep", "best", "stay"),
    [
        (1, None, (40,)),
        (3, None, (20, 30, 40)),
        (9, None, (10, 20, 30, 40)),
        (1, "accuracy", (10, 40)),
        (1, "loss", (20, 40)),
        (2, "loss", (20, 30, 40)),
        (1, "no such metric", (40,)),
    ],
)
def test_the_newest_and_the_best_stay(root, keep, best, stay):
    retention.tidy(root, section(keep, best))
    assert names(root) == step_names(*stay)
    retention.tidy(root, section(keep, best))
    assert names(root) == step_names(*stay)


@pytest.mark.parametrize(
    ("hours", "stay"),
    [(5, (10, 20, 30, 40)), (10, (10, 20, 30, 40)), (11, (10, 30, 40)), (25, (10, 40)), (99, (10, 40))],
)
def test_one_every_few_hours_stays(root, hours, stay):
    """They were saved ten hours apart; which ones stay does not change when it is asked again, nor with new ones."""
    for _ in range(2):
        retention.tidy(root, CheckpointSection(keep=1, keep_every_hours=hours))
        assert names(root) == step_names(*stay)


def test_leftovers_of_killed_saves_go(root):
    for name in ("step-000000050.tmp-0a1b2c3d", "step-000000010.tmp-ffffffff"):
        (root / name).mkdir()
        (root / name / "__0_0.distcp").write_text("torn")
    (root / "notes.txt").write_text("mine")
    retention.tidy(root, section(9))
    assert names(root) == ["notes.txt", *step_names(10, 20, 30, 40)]


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("damaged", [(40,), (40, 30), (40, 30, 20), (30,), (20, 40)])
def test_the_good_ones_outlive_damaged_newer_ones(root, keep, damaged):
    """As after a resume that has passed over the newest: what is saved next is older than what is damaged."""
    for step in damaged:
        flip(root / f"step-{step:09}", random.Random(step))
    good = verify.newest(root, lambda *_: None)
    retention.tidy(root, section(keep))
    assert good.is_dir()
    assert verify.newest(root, lambda *_: None) == good
    assert len(names(root)) <= keep


def test_when_none_is_good_none_is_deleted(root):
    for folder in layout.listed(root):
        add(folder, random.Random(1))
    retention.tidy(root, section(1))
    assert names(root) == step_names(10, 20, 30, 40)


def test_an_unreadable_manifest_stops_nobody(root):
    (root / "step-000000010" / "manifest.json").write_text("{")
    assert retention.best(retention.manifests(root), section(1, "accuracy")) == root / "step-000000020"
    retention.tidy(root, section(1, "accuracy"))
    assert names(root) == step_names(20, 40)


@pytest.mark.parametrize(("best", "step"), [(None, 40), ("accuracy", 10), ("loss", 20), ("f1", 40)])
def test_a_finished_run_stands_for(root, best, step):
    assert retention.chosen(root, section(best=best)) == root / f"step-{step:09}"
    assert retention.chosen(root / "nowhere", section(best=best)) is None


# ---- loading


@pytest.mark.parametrize("step", [10, 40])
def test_tensors_come_back_whatever_the_world(ranks, saved, step):
    folder = layout.folder_of(saved, step)
    expected = tensors_of(step)
    for found in [loaded(folder), *ranks(1, loaded, folder), *ranks(3, loaded, folder)]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def loaded(folder):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
    reader.load(folder, tensors)
    return tensors


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"model.head": torch.zeros(2)}, "model.head is not in it"),
        ({"model.bias": torch.zeros(9)}, r"model.bias is \(8,\) there and \(9,\) here"),
        ({"model.bias": torch.zeros(8, 1)}, r"model.bias is \(8,\) there and \(8, 1\) here"),
        ({f"model.{i}": torch.zeros(1) for i in range(5)}, r"model.0 .*; model.1 .*; model.2 .* \(and 2 more\)"),
    ],
)
def test_another_model_is_refused_by_the_name_of_its_tensors(saved, wanted, message):
    good = {"model.weight": torch.zeros(8, 16)}
    with pytest.raises(CheckpointError, match=f"step-000000010 belongs to another model: {message}"):
        reader.load(saved / "step-000000010", {**good, **wanted})
    assert not good["model.weight"].any(), "nothing is filled half-way"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_reader_of_pytorch_finds_the_same_tensors(saved):
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(20).items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(saved / "step-000000020"), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(20).items())
