"""Lesson 18: the order of a sum, and its bits. Run: python lessons/18_sums.py."""

import hashlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHARDS = [torch.rand(1000, generator=torch.Generator().manual_seed(shard)) - 0.5 for shard in range(8)]


def in_turn(parts):
    """((a + b) + c) + d: one after the other, as a ring adds."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def tree(parts):
    """(a + b) + (c + d): neighbours first, then the sums of neighbours. The number of parts is a power of two."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def digest(tensor):
    """Equal digests mean equal bits."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:8]


def work(rank, store, results):
    """Add the eight shards on one, two and four processes, each time in two ways."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    for world in (1, 2, 4):
        group = dist.new_group(list(range(world)))  # every rank has to call this, also if it is not in the group
        if rank < world:
            own = SHARDS[rank * 8 // world : (rank + 1) * 8 // world]
            usual = in_turn(own)
            dist.all_reduce(usual, group=group)
            parts = [torch.empty(1000) for _ in range(world)]
            dist.all_gather(parts, tree(own), group=group)  # each rank has added its branch of the tree
            if rank == 0:
                print(f"processes: {world}  all_reduce {digest(usual)}  fixed tree {digest(tree(parts))}", flush=True)
                results.put((digest(usual), digest(tree(parts))))
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"(0.1 + 0.2) + 0.3 = {(0.1 + 0.2) + 0.3}, 0.1 + (0.2 + 0.3) = {0.1 + (0.2 + 0.3)}")
    differing = [(in_turn(SHARDS[k:] + SHARDS[:k]) != tree(SHARDS)).sum().item() for k in range(3)]
    print(f"ring that starts at shard 0, 1, 2: {differing} of 1000 sums differ from the tree", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(work, args=(f"{folder}/store", results), nprocs=4)
        usual, fixed = zip(*(results.get() for _ in range(3)), strict=True)
    assert min(differing) > 0 and len(set(usual)) > 1 and len(set(fixed)) == 1
