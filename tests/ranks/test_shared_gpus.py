"""run.device and launch.share_gpus, as far as a machine without a GPU can show them: the group of processes that share
one stages the CPU's tensors here, as it does a GPU's there."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from running import lockstep as run_lockstep
from running import summary
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lockstep
from lockstep.base import devices
from lockstep.base.errors import LaunchError
from lockstep.base.world import World, environment
from lockstep.core.distributed.shared_gpu_group import StagedGroup
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import tree_sum
from lockstep.launch.launch_config import LaunchSection

without_gpus = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without GPUs")
SHORT = ("train.epochs=1", "train.global_batch=256")


def staged():
    """A group of all ranks whose tensors are staged, although they lie on the CPU already."""
    if "STAGED-GLOO" not in dist.Backend._plugins:
        dist.Backend.register_backend("staged-gloo", partial(StagedGroup, staged="cpu"), devices=["cpu"])
    group = dist.new_group(backend="staged-gloo")
    assert isinstance(group, StagedGroup)
    return group


def every_collective():
    group, rank, size = staged(), dist.get_rank(), dist.get_world_size()
    own, found = torch.arange(6.0) + 10 * rank, {}
    dist.all_reduce(total := own.clone(), group=group)
    found["all_reduce"] = total.tolist()
    dist.broadcast(sent := own.clone(), 1, group=group)
    found["broadcast"] = sent.tolist()
    dist.all_gather_into_tensor(whole := torch.empty(6 * size), own, group=group)
    found["all_gather"] = whole.view(size, 6)[:, 0].tolist()
    dist.all_gather(listed := [torch.empty(6) for _ in range(size)], own, group=group)
    found["list"] = [each[0].item() for each in listed]
    dist.reduce_scatter_tensor(part := torch.empty(6 // size), own, group=group)
    found["reduce_scatter"] = part.tolist()
    dist.all_to_all_single(mixed := torch.empty(6), own, group=group)
    found["all_to_all"] = mixed.tolist()
    works = [dist.irecv(received := torch.full((6,), -1.0), (rank - 1) % size, group=group)]
    works += [dist.isend(own, (rank + 1) % size, group=group)]
    assert (received == -1).all()  # its copy may have come, but nobody has waited yet
    for work in works:
        work.wait()
    found["received"] = received[0].item()
    future = dist.all_reduce(later := own.clone(), group=group, async_op=True).get_future()
    found["future"] = future.then(lambda done: done.value()[0]).wait().equal(total) and later.equal(total)
    found["source"] = own.equal(torch.arange(6.0) + 10 * rank)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_of_a_staged_group_gives_what_gloo_gives(ranks, size):
    for rank, found in enumerate(ranks(size, every_collective)):
        width, sums = 6 // size, [size * i + 10 * sum(range(size)) for i in range(6)]
        assert found == {
            "all_reduce": sums,
            "broadcast": [10 + i for i in range(6)],
            "all_gather": [10 * r for r in range(size)],
            "list": [10 * r for r in range(size)],
            "reduce_scatter": sums[width * rank : width * (rank + 1)],
            "all_to_all": [10 * r + width * rank + i for r in range(size) for i in range(width)],
            "received": 10 * ((rank - 1) % size),
            "future": True,
            "source": True,
        }


def summed_and_sharded():
    group, rank, size = staged(), dist.get_rank(), dist.get_world_size()
    rows = torch.randn(size, 1001, generator=torch.Generator().manual_seed(7))
    owners = [frozenset({each}) for each in range(size)]
    reduce = AllReduce(owners, frozenset(range(size)), group)
    sums = [reduce.sum([rows[rank].clone()]), reduce._collective([rows[rank].clone()])]  # as on a CPU, as on a GPU
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",))
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    model(torch.ones(3, 4) * (rank + 1)).sum().backward()
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 2, bias=False), process_group=group)
    wrapped(torch.ones(3, 4) * (rank + 1)).sum().backward()
    return rows, sums, model[0].weight.grad.full_tensor(), wrapped.module.weight.grad


def test_the_trees_sum_fsdp_and_ddp_run_over_a_staged_group(ranks):
    for rows, sums, sharded, replicated in ranks(2, summed_and_sharded):
        for found in sums:
            assert found.equal(tree_sum(rows, frozenset({0, 1})))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        (sum(model(torch.ones(3, 4) * n).sum() for n in (1, 2)) / 2).backward()
        torch.testing.assert_close(sharded, model[0].weight.grad)
        assert replicated.equal(torch.full((2, 4), 4.5))


@without_gpus
def test_a_gpu_that_is_asked_for_and_missing_is_named_before_anything_starts(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {kind: digits}")
    made = run_lockstep(tmp_path, "train", "config.yaml", "run.device=cuda")
    assert made.returncode == 2
    assert "run.device=cuda, but there is no GPU here that torch can use" in made.stderr
    assert "set run.device=auto" in made.stderr
    assert "Traceback" not in made.stderr


@without_gpus
def test_the_cpu_can_be_chosen_and_gpus_that_are_not_there_can_be_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    digests = set()
    (tmp_path / "c.yaml").write_text("launch: {processes: 2}\n")
    for number, override in enumerate(("run.device=auto", "run.device=cpu")):
        done = run_lockstep(tmp_path, "train", "c.yaml", f"run.name=run-{number}", override, *SHORT)
        assert done.returncode == 0, done.stdout + done.stderr
    lockstep.train({"run": {"name": "run-2"}, "launch": {"processes": 2}}, "launch.share_gpus=true", *SHORT)
    for number in range(3):
        found = summary(tmp_path, f"run-{number}")
        digests.add(found["digest"])
        assert not found["shares_gpus"]
        assert found["peak_memory_bytes"] > 2**20
    assert len(digests) == 1
    assert devices.VISIBLE not in os.environ


def test_hidden_gpus_do_not_count(monkeypatch):
    monkeypatch.setenv(devices.VISIBLE, "0")
    with environment(devices.variables("cpu", shares_gpus=True)):
        assert os.environ[devices.VISIBLE] == ""
        assert devices.count_gpus() == 0
        assert World.from_environment().shares_gpus
        assert LaunchSection(kind="local", processes=3).processes_here(1, 8) == 3
        with pytest.raises(LaunchError, match="hides GPUs"):
            devices.check("cuda")
    assert os.environ[devices.VISIBLE] == "0"
    assert not World.from_environment().shares_gpus
