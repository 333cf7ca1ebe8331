"""train.batchnorm: statistics of the shard, or of whatever the ranks hold; where that cannot be, it is said."""

import pathlib

import pytest
import torch
import torch.distributed as dist
from test_training import config_in, run_on_rank
from torch import nn

from lockstep.base.errors import LaunchError
from lockstep.base.world import World
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.numerics.batchnorm import check_synchronised, has_batchnorm, synchronise
from lockstep.core.numerics.digest import digest
from lockstep.run import build
from lockstep.run.recipe import Recipe

NORMED = {"kind": "user", "file": str(pathlib.Path(__file__).parent / "own" / "normed.py")}
SYNC = {"batchnorm": "sync"}


def test_alone_there_is_nothing_to_synchronise(ranks, tmp_path):
    found = {
        kind: ranks(1, run_on_rank, config_in(tmp_path, kind, model=NORMED, train={"batchnorm": kind}))[0]
        for kind in ("shard", "sync")
    }
    assert found["sync"]["digest"] == found["shard"]["digest"]
    assert found["sync"]["digest_depends_on_world"] is None
    assert found["sync"]["numeric_recipe"]["train.batchnorm"] == "sync"


def test_processes_without_gpus_are_told_before_training(ranks, tmp_path):
    for message in ranks(2, run_on_rank, config_in(tmp_path, "a", model=NORMED, train=SYNC)):
        assert message.startswith("LaunchError: train.batchnorm=sync: PyTorch's SyncBatchNorm runs on GPUs only")
        assert "set train.batchnorm=shard, or launch.processes=1" in message
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_a_model_without_batchnorm_keeps_the_promise(ranks, tmp_path):
    found = [ranks(w, run_on_rank, config_in(tmp_path, f"w{w}", train=SYNC))[0] for w in (1, 2)]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[1]["digest_depends_on_world"] is None


def test_fast_says_so_in_the_summary(ranks, tmp_path):
    run = {"dir": str(tmp_path), "name": "a", "reproducibility": "fast"}
    assert (
        "number of processes" in ranks(2, run_on_rank, config_in(tmp_path, "a", run=run))[0]["digest_depends_on_world"]
    )


def test_two_ranks_evaluate_what_they_cannot_train(ranks, tmp_path):
    """A run that was trained on GPUs can be measured on CPUs."""
    config = config_in(tmp_path, "a", model=NORMED, train=SYNC)
    (alone,) = ranks(1, evaluate_on_rank, config)
    for found in ranks(2, evaluate_on_rank, config):
        assert found["values"] == alone["values"]
        assert found["digest"] == alone["digest"]
        assert "runs on GPUs only" in found["refused"]
        assert (alone["note"], found["note"].split(":")[0]) == (None, "batchnorm is sync")
        assert "an epoch's last step has 1 for 2 processes" in found["refused_on_gpus"]


def evaluate_on_rank(config):
    """A model, evaluated, and asked whether it could be trained, here and on GPUs."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    parts = build.assemble(Recipe.model_validate(config), world, torch.device("cpu"))
    parts.model.eval()
    return {
        "values": parts.evaluate().values,
        "digest": digest(parts.strategy.state()),
        "note": parts.world_size_dependence,
        "refused": refusal(parts, "cpu"),
        "refused_on_gpus": refusal(parts, "cuda"),
    }


def refusal(parts, device):
    parts.device = torch.device(device)
    try:
        parts.check_training()
    except LaunchError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("own", "together", "good"), [(2, 4, True), (3, 5, False), (2, 5, False), (0, 1, False)])
def test_every_rank_must_have_equally_many_micro_batches(own, together, good):
    shares = {"a step": (2, 4), "an epoch's last step": (own, together)}
    if good:
        check_synchronised(torch.device("cuda"), 2, shares)
    else:
        with pytest.raises(LaunchError, match=f"an epoch's last step has {together} for 2 processes"):
            check_synchronised(torch.device("cuda"), 2, shares)


def test_conversion_keeps_weights_names_and_statistics():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.BatchNorm1d(9))
    before, weight = digest(model.state_dict()), model[1][0].weight
    synchronise(model, torch.device("cpu"))
    assert type(model[1][0]) is nn.BatchNorm2d
    assert len(BufferUpdates(dict(model.named_modules())).buffers) == 6
    synchronise(model, torch.device("cuda"))
    assert has_batchnorm(model)
    assert isinstance(model[1][0], nn.SyncBatchNorm)
    assert isinstance(model[2], nn.SyncBatchNorm)
    assert model[1][0].weight is weight
    assert digest(model.state_dict()) == before
    assert not BufferUpdates(dict(model.named_modules())).buffers  # they are PyTorch's own affair now
