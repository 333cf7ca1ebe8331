"""Lesson 5: add the gradients of two ranks by hand, then by DDP. Run: python lessons/05_ddp_by_hand.py."""

import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lockstep.run import teaching


def build(options=None, spec=None):
    torch.manual_seed(0)
    return torch.nn.Sequential(teaching.Pixels(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def train(rank, by_ddp):
    def noting_hook(_, bucket):  # DDP calls it when all gradients of a bucket are there
        ready.append(sum(parameter.grad is not None for parameter in network.parameters()))
        return allreduce_hook(None, bucket)  # what DDP does without a hook: start a mean over the ranks, do not wait

    data, ready, network = teaching.digits("train"), [], build()
    network[1].weight.data += rank  # as if the ranks had started from different seeds
    model = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.001) if by_ddp else network
    for parameter in [] if by_ddp else network.parameters():
        dist.broadcast(parameter.data, src=0)  # DDP has done this
    if by_ddp:
        model.register_comm_hook(None, noting_hook)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in range(46):  # two epochs of batches of 64, of which each rank takes half
        halves = teaching.order(1442, step, global_batch=64, micro_batch=32)
        batch = {name: values[halves[rank]] for name, values in data.items()}
        loss = torch.nn.functional.cross_entropy(model(batch), batch["label"], reduction="sum")
        optimizer.zero_grad()
        (loss * 2 if by_ddp else loss).backward()  # times the ranks, because DDP takes the mean over them
        for parameter in network.parameters():
            if not by_ddp:
                dist.all_reduce(parameter.grad)  # the sum, after the whole backward pass
            parameter.grad *= 1 / sum(map(len, halves))
        optimizer.step()
    return network, ready[-2:]  # of the last step


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    (by_hand, _), (network, ready) = train(rank, by_ddp=False), train(rank, by_ddp=True)
    dist.destroy_process_group()
    time.sleep(0.5)  # torch 2.13 with gloo sometimes aborts a process that ends right after using DDP
    assert ready == [2, 4] and all(map(torch.equal, by_hand.parameters(), network.parameters()))
    if rank == 0:
        print(f"by hand and by DDP: the same bits; DDP exchanged when it had {ready[0]} and {ready[1]} of 4 gradients")
        recipe = ["train.steps=46", "train.global_batch=64", "train.micro_batch=32", "optim.lr=0.1"]
        print(teaching.compare(network, __file__, recipe, processes=2))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"{folder}/store",), nprocs=2)
