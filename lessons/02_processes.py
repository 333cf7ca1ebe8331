"""Lesson 2: processes, ranks and the world size.

python lessons/02_processes.py
torchrun --nproc-per-node 2 lessons/02_processes.py
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
notes = []  # every process has a list of its own


def work():
    """Every process runs this same function; only the rank differs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
    rank, world, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    notes.append(f"written by rank {rank}")

    # The processes share no memory. They know of each other only what they send.
    mine = {"rank": rank, "local_rank": local_rank, "process": os.getpid(), "notes": notes}
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)

    assert [one["rank"] for one in everyone] == list(range(world))
    assert len({one["process"] for one in everyone}) == world, "two ranks in one process"
    assert notes == [f"written by rank {rank}"], "another process wrote into this list"
    if rank == 0:  # one process prints, so that lines do not mix
        for one in everyone:
            print(f"rank {one['rank']} of {world}, local rank {one['local_rank']}: notes = {one['notes']}")
        print(f"{world} ranks, {len({one['process'] for one in everyone})} different process ids")
    dist.destroy_process_group()


def start(rank, port):
    """What a launcher does for each process: it sets five environment variables."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(WORLD))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))  # they are equal on a single machine
    work()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process and set the variables
        work()
    else:
        with socket.socket() as probe:  # port 0 asks the system for a free port
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        mp.spawn(start, args=(free_port,), nprocs=WORLD)
