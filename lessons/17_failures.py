"""Lesson 17: a hang, weights that differ, a lost rank. Run: python lessons/17_failures.py."""

import hashlib
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def error_of(action):
    """The text of the error that a collective raises; empty if it succeeds."""
    try:
        return action() or ""
    except RuntimeError as error:
        return str(error)


def work(rank, folder):
    """Three failures, one after the other. Rank 0 reports."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    short = dist.new_group(timeout=timedelta(seconds=3))  # the default is 30 minutes

    # 1. A hang: rank 1 skips a collective, for instance by `if rank == 0:` around it.
    if rank == 0:
        assert "Timed out" in error_of(lambda: dist.all_reduce(torch.ones(1), group=short))
        print("hang: rank 0 waited in all_reduce and gave up after its timeout", flush=True)
        store.set("gave up", "yes")
    store.wait(["gave up"], timedelta(seconds=30))  # rank 1 lives on meanwhile: a timeout is the only sign

    # 2. Weights that differ raise no error. Comparing checksums shows them.
    weights = torch.tensor([1, 1, 1 + 1e-6 * rank, 1])
    checksums = [None] * WORLD
    dist.all_gather_object(checksums, hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:8])
    assert checksums[0] != checksums[1], "a difference in one bit changes the checksum"
    if rank == 0:
        print(f"desync: checksum on rank 0 is {checksums[0]}, on rank 1 {checksums[1]}", flush=True)

    # 3. A lost rank: the others get an error as soon as its connections close.
    if rank == 1:
        os.kill(os.getpid(), 9)  # what the kernel does when memory runs out
    assert error_of(lambda: dist.all_reduce(torch.ones(1))), "the lost rank was not missed"
    print("lost rank: all_reduce raised an error on rank 0", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn = mp.get_context("spawn")
        ranks = [spawn.Process(target=work, args=(rank, folder), daemon=True) for rank in range(WORLD)]
        [rank.start() for rank in ranks]
        [rank.join(60) for rank in ranks]
        print(f"exit codes: {[rank.exitcode for rank in ranks]}")
        assert [rank.exitcode for rank in ranks] == [0, -9]
