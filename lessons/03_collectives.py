"""Lesson 3: the collectives, on three processes. Run: python lessons/03_collectives.py."""

import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 3


def show(name, value, expected):
    """Rank 0 prints what each rank holds, in the order of the ranks."""
    assert value == expected, f"{name}: {value} instead of {expected}"
    held = [None] * WORLD
    dist.all_gather_object(held, value)
    if dist.get_rank() == 0:
        print(f"{name:15}" + "".join(f"rank {rank}: {one!s:14}" for rank, one in enumerate(held)).rstrip(), flush=True)


def work(rank, store):
    """Each rank starts with one number: 1, 2 or 3."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mine = torch.tensor([rank + 1])
    show("start", mine.tolist(), [rank + 1])
    x = mine.clone()
    dist.broadcast(x, src=0)  # rank 0's tensor overwrites the others
    show("broadcast", x.tolist(), [1])
    parts = [torch.tensor([10]), torch.tensor([20]), torch.tensor([30])]
    dist.scatter(x, parts if rank == 0 else None, src=0)  # rank 0 sends one part to each rank
    show("scatter", x.tolist(), [10 * (rank + 1)])
    found = list(torch.zeros(WORLD, 1, dtype=torch.int64))  # space for one tensor from each rank
    dist.gather(mine, found if rank == 0 else None, dst=0)  # rank 0 gets everything
    show("gather", torch.cat(found).tolist(), [1, 2, 3] if rank == 0 else [0, 0, 0])
    dist.all_gather(found, mine)  # everyone gets everything
    show("all_gather", torch.cat(found).tolist(), [1, 2, 3])
    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.SUM)  # everyone gets the sum
    show("all_reduce", x.tolist(), [6])
    dist.reduce_scatter(x, [mine, mine * 10, mine * 100])  # each rank gets one part of the sum
    show("reduce_scatter", x.tolist(), [6 * 10**rank])
    x = torch.tensor([100])
    if rank > 0:
        dist.recv(x, src=rank - 1)  # waits for the message of the rank before
    if rank < WORLD - 1:
        dist.send(x + 1, dst=rank + 1)
    show("send, recv", x.tolist(), [100 + rank])
    time.sleep(0.2 * rank)  # the ranks come to the barrier at different times
    times, came = [None] * WORLD, time.monotonic()
    dist.barrier()  # nobody goes on before everybody has come
    dist.all_gather_object(times, (came, time.monotonic()))
    show("barrier", "waited" if times[rank][1] >= max(came for came, _ in times) else "left early", "waited")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"{folder}/store",), nprocs=WORLD)
