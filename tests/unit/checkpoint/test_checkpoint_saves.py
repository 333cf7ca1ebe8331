"""Saves that fail, on one rank or on all: an error everywhere, nothing left behind, and the older ones stay."""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from written_checkpoints import manifest_of, names, save, save_all, step_names

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import layout, reader, verify, weights
from lockstep.checkpoint.writer import Writer, assigned_names
from lockstep.core.numerics.digest import digest

resource = pytest.importorskip("resource")  # sets limits; Windows has none


@pytest.fixture
def root(ranks, tmp_path):
    """A folder that holds the checkpoint of step 40 already."""
    ranks(2, save_all, tmp_path / "checkpoints", [40], [{"accuracy": 0.5}])
    return tmp_path / "checkpoints"


def try_to_save(root, small_rank):
    """Save; on `small_rank` no file may grow beyond 64 KB, as on a full disk. Returns what was raised."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == small_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        return save(root, {f"model.{i}": torch.ones(50_000) for i in range(4)}, manifest_of(50)).failure
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("world", [1, 2])
def test_an_unwritable_place_is_an_error_on_every_rank(ranks, tmp_path, world):
    (tmp_path / "file").write_text("not a folder")
    said = ranks(world, try_to_save, tmp_path / "file" / "checkpoints", None)
    assert "Not a directory" in said[0]
    assert said == said[:1] * world
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("small_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_every_rank(ranks, root, small_rank):
    """And is harmless: the older checkpoint stays, and the same save succeeds when there is room again."""
    said = ranks(2, try_to_save, root, small_rank)
    assert f"(rank {small_rank}); " in said[0]
    assert said[0].endswith(" GB are free there")
    assert "\n" not in said[0]
    assert said == said[:1] * 2
    assert names(root) == step_names(40)
    assert verify.newest(root, lambda *_: None) == root / "step-000000040"
    assert ranks(2, try_to_save, root, None) == [None, None]
    assert verify.newest(root, lambda *_: None) == root / "step-000000050"


def save_as_nobody(root):
    """Of this rank's save: what was raised, by a user who may not write here."""
    writer = Writer(root)
    os.seteuid(65534)
    try:
        writer.start({"model.weight": torch.ones(9)}, manifest_of(50))
        return writer.finished().failure
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_without_permission_the_older_one_stays(ranks, root):
    said = ranks(2, save_as_nobody, root)
    assert "Permission denied" in said[0]
    assert said == said[:1] * 2
    assert names(root) == step_names(40)


def save_twice_with_the_folder_gone_between(root):
    writer, found = Writer(root), []
    for step in (1, 2):
        writer.start({"model.weight": torch.full((9,), float(step))}, manifest_of(step))
        found.append(writer.finished().failure)
        dist.barrier()
        if dist.get_rank() == 0 and step == 1:
            shutil.rmtree(root.parent)
        dist.barrier()
    return found


def test_a_folder_that_vanished_is_made_again(ranks, tmp_path):
    root = tmp_path / "run" / "checkpoints"
    assert ranks(2, save_twice_with_the_folder_gone_between, root) == [[None, None]] * 2
    assert verify.problem(root / "step-000000002") is None
    assert names(root) == step_names(2)


def save_while_training_goes_on(root):
    """The tensor is changed as soon as `start` returns -> whether the save was still under way then."""
    tensors = {"model.weight": torch.full((3_000_000,), 7.0), "optimizer.weight.exp_avg": torch.full((3_000_000,), 8.0)}
    writer = Writer(root)
    writer.warm_up(tensors)
    writer.start(tensors, manifest_of(1))
    was_busy = writer.is_busy
    for tensor in tensors.values():
        tensor.zero_()
    return was_busy, writer.finished().failure


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_save_holds_what_was_there_when_it_began(ranks, tmp_path, world):
    """Each rank writes its part: no tensor twice."""
    assert ranks(world, save_while_training_goes_on, tmp_path) == [(True, None)] * world
    folder = tmp_path / "step-000000001"
    found = {name: torch.empty(3_000_000) for name in ("model.weight", "optimizer.weight.exp_avg")}
    reader.load(folder, found)
    assert [tensor.unique().tolist() for tensor in found.values()] == [[7.0], [8.0]]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 24_000_000 * 1.01
    assert layout.read_manifest(folder).digest == digest({"weight": torch.full((3_000_000,), 7.0)})


def save_and_cancel(root):
    writer = Writer(root)
    writer.start({"model.weight": torch.ones(1_000_000)}, manifest_of(50))
    writer.cancel()
    return writer.finished().failure


def test_what_is_cancelled_never_becomes_a_checkpoint(ranks, root):
    assert "it was cancelled" in ranks(2, save_and_cancel, root)[0]
    assert names(root) == step_names(40)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_tensor_is_written_by_one_rank_and_the_work_is_even(world):
    sizes = [1000, 1, 1, 0, 400, 300, 300, 500, 500, 2]
    tensors = {f"t{number}": torch.empty(size) for number, size in enumerate(sizes)}
    shares = [assigned_names(tensors, rank, world) for rank in range(world)]
    assert sorted(name for names in shares for name in names) == sorted(tensors)
    loads = [sum(tensors[name].numel() for name in names) for names in shares]
    assert max(loads) <= max(1000, sum(sizes) / world * 4 / 3)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_saving_a_step_again_replaces_a_damaged_one_only(ranks, root, is_damaged):
    """A whole one holds the same state, and there would be none while one takes the other's place."""
    folder = root / "step-000000040"
    if is_damaged:
        (folder / "__0_0.distcp").write_text("torn")
    ranks(2, save_all, root, [40], [{"accuracy": 1.0}])
    assert layout.listed(root) == [folder]
    assert layout.read_manifest(folder).metrics == {"accuracy": 1.0 if is_damaged else 0.5}
    assert verify.problem(folder) is None


def save_module(root, average):
    module = nn.Linear(3, 2)
    tensors = {f"model.{name}": torch.full_like(tensor, 2.0) for name, tensor in module.state_dict().items()}
    if average:
        tensors |= {f"ema.{name}": torch.full_like(tensor, 5.0) for name, tensor in module.state_dict().items()}
    save(root, tensors, manifest_of(1))


@pytest.mark.parametrize(("average", "value"), [(False, 2.0), (True, 5.0)])
def test_weights_alone_are_the_average_where_there_is_one(lone, tmp_path, average, value):
    save_module(tmp_path, average)
    module = nn.Linear(3, 2)
    weights.restore_model(module, tmp_path / "step-000000001")
    assert all((parameter == value).all() for parameter in module.parameters())
    with pytest.raises(CheckpointError, match=r"weight is \(2, 3\) there and \(2, 4\) here"):
        weights.restore_model(nn.Linear(4, 2), tmp_path / "step-000000001")


def save_at_the_end(root, is_last):
    """What this rank copied; a weight in another memory format is among the tensors."""
    other = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    weight = nn.Parameter(torch.arange(3_000_000.0).view(3, -1))
    writer = Writer(root)
    writer.start({"model.weight": weight, "model.other": other}, manifest_of(1), is_last=is_last)
    assert writer.finished().failure is None
    return sorted(writer.copies)


def test_the_last_save_copies_nothing_that_can_be_written_as_it_is(ranks, tmp_path):
    """And writes the same files."""
    assert ranks(1, save_at_the_end, tmp_path / "copied", False) == [["model.other", "model.weight"]]
    assert ranks(1, save_at_the_end, tmp_path / "last", True) == [["model.other"]]
    one, other = (layout.read_manifest(tmp_path / name / "step-000000001") for name in ("copied", "last"))
    assert (one.digest, one.files) == (other.digest, other.files)
