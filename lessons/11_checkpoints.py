"""Lesson 11: checkpoints that survive a kill, and resume in mid-epoch. Run: python lessons/11_checkpoints.py."""

import os
import tempfile
import time

import torch
import torch.distributed as dist


def save(state, folder, half=None):
    """Write a temporary file, sync, rename. So checkpoint.pt is always complete: the old one or the new one."""
    with open(f"{folder}/checkpoint.tmp", "wb") as file:
        torch.save(state, file)
        if half:
            file.truncate(file.tell() // 2)  # as if only half of the file had been written
            os.kill(os.getpid(), 9)
        file.flush()
        os.fsync(file.fileno())  # the contents are on the disk before the new name is
    os.replace(f"{folder}/checkpoint.tmp", f"{folder}/checkpoint.pt")


def train(rank, state, stop):
    samples, batch = 32, 4  # batch: over all ranks together; 8 steps in an epoch
    torch.manual_seed(0)
    inputs, model = torch.randn(samples, 3), torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state:
        model.module.load_state_dict(state["model"])  # the model inside DDP: names without "module."
        optimizer.load_state_dict(state["optimizer"])  # without it, the momentum would start at zero
    for seen in range(state["seen"] if state else 0, stop, batch):  # `seen` tells where to go on, in mid-epoch, too
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seen // samples))
        x = inputs[order[seen % samples :][:batch][rank::2]]
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "seen": stop}


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole, part = train(rank, None, stop=64), train(rank, None, stop=20)  # two epochs; and a stop in the first
    if rank == 0:  # one rank saves: the weights are the same on all ranks
        save(part, folder)
        killed = torch.multiprocessing.Process(target=save, args=(part | {"seen": 64}, folder, True))  # a later save
        killed.start()
        killed.join()
        print(f"killed in mid-save (exit code {killed.exitcode}): {sorted(os.listdir(folder))}", flush=True)
    dist.barrier()  # nobody reads before the checkpoint is there
    resumed = train(rank, torch.load(f"{folder}/checkpoint.pt", map_location="cpu"), stop=64)
    assert all(torch.equal(whole["model"][name], resumed["model"][name]) for name in ("weight", "bias"))
    dist.destroy_process_group()
    time.sleep(0.5)  # torch 2.13 with gloo sometimes aborts a process that ends right after using DDP


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(folder,), nprocs=2)
        print("resumed after 20 of 64 samples: the same weights, bit for bit, as without the break")
