"""Lesson 16: several machines. Run: python lessons/16_several_nodes.py.

Two launchers on this machine stand for two machines. On real ones you would type, with the name of the first machine:
torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr FIRST --master-port 29500 16_several_nodes.py
torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr FIRST --master-port 29500 16_several_nodes.py
"""

import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist

NODES, PROCESSES = 2, 2  # processes per node


def work():
    """What every process on every node runs. The launcher of its node has set the variables."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ("GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")  # torchrun's name for a node is group
    mine = {name: os.environ[name] for name in names} | {"launcher": os.getppid()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)  # over the processes of both nodes

    assert total == sum(range(1, NODES * PROCESSES + 1))
    assert len({each["launcher"] for each in everyone}) == NODES  # the processes of a node have one parent
    assert len({each["MASTER_ADDR"] for each in everyone}) == 1  # all have met at the same place
    for rank, each in enumerate(everyone):
        assert rank == int(each["RANK"]) == int(each["GROUP_RANK"]) * PROCESSES + int(each["LOCAL_RANK"])
        if dist.get_rank() == 0:
            print(f"node {each['GROUP_RANK']}  rank {rank} of {each['WORLD_SIZE']}  local rank {each['LOCAL_RANK']}")
    if dist.get_rank() == 0:
        print(f"sum of rank + 1 over all ranks: {total.item()}")
    dist.destroy_process_group()


def launch(node, port):
    """What one types on a node."""
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    size = ["--nnodes", str(NODES), "--node-rank", str(node), "--nproc-per-node", str(PROCESSES)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *size, *where, __file__]
    return subprocess.Popen(torchrun, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    if "RANK" in os.environ:  # a launcher has started this process
        work()
    else:
        with socket.socket() as probe:  # port 0 asks the system for a free port
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        nodes = [launch(node, free_port) for node in range(NODES)]
        assert [node.wait() for node in nodes] == [0, 0]
