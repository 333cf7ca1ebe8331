"""Lesson 15: tensor parallelism, each rank computes a part of a layer. Run: python lessons/15_tensor_parallel.py."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # noqa: TID253
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lockstep.run import teaching


def build(options=None, spec=None):
    torch.manual_seed(0)
    return nn.Sequential(teaching.Pixels(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 10))


def by_hand(model, batch):
    x = model[:3](batch)  # not split: the same on both ranks
    # Backward, a rank has the gradient through its half of layer 3 only: add both. (all_reduce itself returns None.)
    x.register_hook(lambda gradient: dist.all_reduce(total := gradient.clone()) or total)
    half = model[3:5](x)  # column-wise: a rank computes 4 of the 8 hidden numbers, from all 32 inputs
    partial = nn.functional.linear(half, model[5].weight)  # row-wise: 4 of the 8 terms of each output
    dist.all_reduce(partial.data)  # .data: only forward; backward, the gradient goes to both ranks as it is
    return partial + model[5].bias  # once, after the sum


def train(model, forward):
    data, optimizer = teaching.digits("train"), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(46):  # two epochs; both ranks take the whole batch
        (rows,) = teaching.order(1442, step, global_batch=64, micro_batch=64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward({"image": data["image"][rows]}), data["label"][rows]).backward()
        optimizer.step()


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    split, model, whole = build(), build(), build()
    parts = split[3].weight.chunk(2)[rank], split[3].bias.chunk(2)[rank], split[5].weight.chunk(2, dim=1)[rank]
    split[3].weight, split[3].bias, split[5].weight = (nn.Parameter(part.detach().clone()) for part in parts)
    train(split, lambda batch: by_hand(split, batch))
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), {"3": ColwiseParallel(), "5": RowwiseParallel()})
    train(model, model)
    whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    assert torch.allclose(by_hand(split, teaching.digits("test")), whole(teaching.digits("test")), atol=1e-4)
    dist.destroy_process_group()
    if rank == 0:
        for (name, x), part in zip(whole.named_parameters(), split.parameters(), strict=True):
            print(f"{name} {list(x.shape)}: each rank holds {list(part.shape)}")
        print("after 46 steps, by hand and by parallelize_module: outputs equal up to rounding")
        recipe = ["train.steps=46", "train.global_batch=64", "train.micro_batch=64", "optim.lr=0.1"]
        print(teaching.compare(whole, __file__, recipe, processes=1, why="sums over 8 are two sums over 4"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"{folder}/store",), nprocs=2)
