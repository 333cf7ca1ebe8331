"""Which ranks are on the same machine, and can share memory."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.distributed.process_group import own_group


@dataclass(frozen=True, kw_only=True)
class Topology:
    """M machines with L ranks each, as a table: each row is a machine."""

    machines: tuple[tuple[int, ...], ...]
    """Ranks of each machine, [M][L]."""
    column: int
    """This rank's index on its machine, 0..L-1."""
    row_group: dist.ProcessGroup
    """The ranks of this rank's machine."""
    column_group: dist.ProcessGroup
    """The ranks with the same index on each machine."""


def topology(machine: str) -> Topology | None:
    """The topology, from each rank's machine name; None if no two ranks share a machine, or machines have different
    numbers of ranks. Collective.
    """
    names = all_gather_object(machine)
    machines = tuple(tuple(rank for rank, name in enumerate(names) if name == each) for each in dict.fromkeys(names))
    width = len(machines[0])
    if width == 1 or any(len(ranks) != width for ranks in machines):
        return None
    row_group = own_group(machines, backend="gloo")
    column_group = own_group([*zip(*machines, strict=True)], backend="gloo")
    rank = dist.get_rank()
    column = next(ranks.index(rank) for ranks in machines if rank in ranks)
    return Topology(machines=machines, column=column, row_group=row_group, column_group=column_group)


def this_machine() -> str:
    """A name that is equal for two processes of one machine that can see each other: a container with its own network
    or PID namespace counts as a machine."""
    unique = f"process {os.getpid()} of rank {dist.get_rank()}"
    if sys.platform != "linux":
        return unique
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])
    except OSError:
        return unique
