"""Saves that fail, on one rank or on all: an error everywhere, nothing left behind, and the older ones stay."""

import pytest
import torch
import torch.distributed as dist
from conftest import save
from test_checkpoint_files import manifest_of, names, save_all, step_names
from torch import nn

from lockstep.checkpoint import layout, verify, weights
from lockstep.errors import CheckpointError

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
    weights.restore(module, tmp_path / "step-000000001")
    assert all((parameter == value).all() for parameter in module.parameters())
    with pytest.raises(CheckpointError, match=r"weight is \(2, 3\) there and \(2, 4\) here"):
        weights.restore(nn.Linear(4, 2), tmp_path / "step-000000001")
