"""train.batchnorm: statistics of the shard, or of whatever the ranks hold; where that cannot be, it is said."""

import pytest
import torch
import torch.distributed as dist
from places import OWN
from torch import nn
from training_runs import config_in, run_on_rank

from lockstep.base.errors import LaunchError
from lockstep.base.world import World
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.numerics.batchnorm import check_synchronised, has_batchnorm, is_synchronised, synchronise
from lockstep.core.numerics.digest import digest
from lockstep.recipe import build
from lockstep.recipe.recipe import Recipe

NORMED = {"kind": "user", "file": str(OWN / "normed.py")}
SYNC = {"batchnorm": "sync"}


def test_alone_there_is_nothing_to_synchronise(ranks, tmp_path):
    found = {
        kind: ranks(1, run_on_rank, config_in(tmp_path, kind, model=NORMED, train={"batchnorm": kind}))[0]
        for kind in ("shard", "sync")
    }
    assert found["sync"]["digest"] == found["shard"]["digest"]
    assert found["sync"]["digest_depends_on_world"] is None
    assert found["sync"]["numeric_recipe"]["train.batchnorm"] == "sync"


def test_two_processes_train_on_the_statistics_of_both(ranks, tmp_path):
    """With one micro-batch each, those of one process with a micro-batch of twice the size."""
    halves = {"batchnorm": "sync", "micro_batch": 8, "global_batch": 16, "steps": 6}
    whole, model = {**halves, "micro_batch": 16}, {**NORMED, "options": {"has_dropout": False}}
    found, _ = ranks(2, run_on_rank, config_in(tmp_path, "two", model=model, train=halves))
    fsdp = {"kind": "fsdp"}
    sharded, _ = ranks(2, run_on_rank, config_in(tmp_path, "fsdp", model=model, train=halves, parallel=fsdp))
    (alone,) = ranks(1, run_on_rank, config_in(tmp_path, "one", model=model, train=whole))
    assert "batchnorm is sync" in found["digest_depends_on_world"]
    assert sharded["digest"] == found["digest"]
    assert found["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-4)


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
    config = config_in(tmp_path, "a", model=NORMED, train=SYNC)
    (alone,) = ranks(1, evaluate_on_rank, config)
    for found in ranks(2, evaluate_on_rank, config):
        assert found["values"] == alone["values"]
        assert found["digest"] == alone["digest"]
        assert (alone["note"], found["note"].split(":")[0]) == (None, "batchnorm is sync")
        assert "an epoch's last step has 1 for 2 processes" in found["refused"]


def evaluate_on_rank(config):
    """A model, evaluated, and asked whether it could be trained."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    parts = build.assemble(Recipe.model_validate(config), world, torch.device("cpu"))
    parts.model.eval()
    return {
        "values": parts.evaluate().values,
        "digest": digest(parts.strategy.state()),
        "note": parts.world_size_dependence,
        "refused": refusal(parts),
    }


def refusal(parts):
    try:
        parts.check_training()
    except LaunchError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("own", "together", "good"), [(2, 4, True), (3, 5, False), (2, 5, False), (0, 1, False)])
def test_every_rank_must_have_equally_many_micro_batches(own, together, good):
    shares = {"a step": (2, 4), "an epoch's last step": (own, together)}
    if good:
        check_synchronised(2, shares)
    else:
        with pytest.raises(LaunchError, match=f"an epoch's last step has {together} for 2 processes"):
            check_synchronised(2, shares)


def test_conversion_keeps_weights_names_and_statistics(ranks):
    ranks(2, converted, "cpu")


def converted(device):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.BatchNorm1d(9))
    before, weight = digest(model.state_dict()), model[1][0].weight
    assert len(BufferUpdates(dict(model.named_modules())).buffers) == 6
    synchronise(model, torch.device(device))
    assert has_batchnorm(model)
    assert is_synchronised(model[1][0]) and is_synchronised(model[2])
    assert model[1][0].weight is weight
    assert digest(model.state_dict()) == before
    assert not BufferUpdates(dict(model.named_modules())).buffers  # they are equal on all ranks anyway
    dist.barrier()  # a rank that left would close the connections of the group that others still open


def test_gpus_have_pytorchs_own():
    model = nn.Sequential(nn.BatchNorm2d(4))
    synchronise(model, torch.device("cuda"))
    assert isinstance(model[0], nn.SyncBatchNorm)


SLICES = {"even": [4, 4], "uneven": [1, 5, 2], "empty": [0, 6, 2]}
KINDS = {
    "images": (lambda: nn.BatchNorm2d(3), (8, 3, 5, 5)),
    "vectors": (lambda: nn.BatchNorm1d(3), (8, 3)),
    "cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (8, 3, 7)),
    "plain": (lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False), (8, 3)),
}


@pytest.mark.parametrize("sizes", SLICES.values(), ids=SLICES)
def test_slices_are_normalised_as_the_whole_batch_is(ranks, sizes):
    for name in KINDS:
        ranks(len(sizes), compared, name, sizes)


def compared(name, sizes):
    """Two steps: outputs, gradients and running statistics of a rank's slice, and of the whole batch."""
    make, shape = KINDS[name]
    torch.manual_seed(0)
    alone, batches = make(), [torch.randn(shape) * 3 + 5 for _ in range(2)]
    model = nn.Sequential(make())
    model.load_state_dict({f"0.{key}": value for key, value in alone.state_dict().items()})
    synchronise(model, torch.device("cpu"))
    for batch in batches:
        whole = batch.clone().requires_grad_()
        mine = batch.split(sizes)[dist.get_rank()].clone().requires_grad_()
        for module in (alone, model):
            module.zero_grad()
        expected, outputs = alone(whole), model(mine)
        for each in (expected, outputs):
            each.tanh().square().sum().backward()
        torch.testing.assert_close(outputs, expected.split(sizes)[dist.get_rank()], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.grad, whole.grad.split(sizes)[dist.get_rank()], rtol=1e-4, atol=1e-6)
        for parameter, reference in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-5)
        for buffer, reference in zip(model.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(buffer, reference)
    if name != "plain":  # which has no running statistics
        torch.testing.assert_close(model.eval()(mine), alone.eval()(whole).split(sizes)[dist.get_rank()])


def test_one_value_in_all_is_refused(ranks):
    ranks(2, alone_in_all)


def alone_in_all():
    model = nn.Sequential(nn.BatchNorm1d(3))
    synchronise(model, torch.device("cpu"))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1 - dist.get_rank(), 3))
