"""Lesson 7: gradient accumulation with DDP. Run: python lessons/07_accumulation.py."""

import contextlib
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
SIZES = [[4, 4, 4], [4, 4, 1]]  # the micro-batches of each rank: 21 samples in one step


def gradient(rank, micro_batches, *, with_no_sync, right_mean):
    """The gradient of one step, and the number of all-reduces that it took."""
    torch.manual_seed(0)
    model, calls = DistributedDataParallel(torch.nn.Linear(3, 1)), []

    def counting_hook(state, bucket):
        calls.append(bucket.index())
        return allreduce_hook(state, bucket)  # what DDP does without a hook: the mean over the ranks

    model.register_comm_hook(None, counting_hook)
    for number, (x, y) in enumerate(micro_batches[rank]):
        last = number == len(micro_batches[rank]) - 1
        with model.no_sync() if with_no_sync and not last else contextlib.nullcontext():
            if right_mean:  # sum over the samples; one division by all samples; WORLD undoes DDP's mean
                loss = mse_loss(model(x), y, reduction="sum") * WORLD / sum(map(sum, SIZES))
            else:  # a mean of means: the single sample of the small micro-batch counts four times
                loss = mse_loss(model(x), y) / len(micro_batches[rank])
            loss.backward()  # outside no_sync, DDP exchanges the gradients here
    return model.module.weight.grad, len(calls)


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    micro_batches = [[(torch.randn(n, 3), torch.randn(n, 1)) for n in sizes] for sizes in SIZES]
    x, y = (torch.cat(part) for part in zip(*sum(micro_batches, []), strict=True))
    mse_loss(model(x), y).backward()
    for with_no_sync, right_mean in ((False, True), (True, True), (True, False)):
        found, calls = gradient(rank, micro_batches, with_no_sync=with_no_sync, right_mean=right_mean)
        equal = torch.allclose(found, model.weight.grad, atol=1e-6)
        assert calls == (1 if with_no_sync else 3) and equal == right_mean
        if rank == 0:
            kind = "sum / all samples" if right_mean else "mean of means    "
            print(f"no_sync: {with_no_sync!s:5}  loss: {kind}  all-reduces: {calls}  gradient right: {equal}")
    dist.destroy_process_group()
    time.sleep(0.5)  # torch 2.13 with gloo sometimes aborts a process that ends right after using DDP


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"{folder}/store",), nprocs=WORLD)
