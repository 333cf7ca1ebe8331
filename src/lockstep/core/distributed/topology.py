"""Which ranks share a machine, so that they can share memory."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lockstep.core.distributed.collectives import all_gather_object


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The world as a table of M machines with L ranks each; this rank stands in one row and one column."""

    machines: tuple[tuple[int, ...], ...]
    """Ranks of each machine, [M][L]."""
    place: int
    """This rank's column, 0..L-1."""
    beside: dist.ProcessGroup
    """The ranks of this rank's machine, its row."""
    across: dist.ProcessGroup
    """The ranks with the same place on each machine, its column."""


def topology(machine: str) -> Topology | None:
    """The table, when each rank has named its machine; None where no two share one, or machines differ in their number
    of ranks. Every rank has to call it.
    """
    where = all_gather_object(machine)
    machines = tuple(tuple(rank for rank, name in enumerate(where) if name == each) for each in dict.fromkeys(where))
    width = len(machines[0])
    if width == 1 or any(len(ranks) != width for ranks in machines):
        return None
    rank = dist.get_rank()
    beside, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in machines], backend="gloo")
    across, _ = dist.new_subgroups_by_enumeration(
        [list(ranks) for ranks in zip(*machines, strict=True)], backend="gloo"
    )
    place = next(ranks.index(rank) for ranks in machines if rank in ranks)
    assert beside is not None
    assert across is not None
    return Topology(machines=machines, place=place, beside=beside, across=across)


def this_machine() -> str:
    """Equal for two processes of one machine that can see each other's; containers with a network or with process
    numbers of their own count as machines."""
    alone = f"process {os.getpid()} of rank {dist.get_rank()}"
    if sys.platform != "linux":
        return alone
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])
    except OSError:
        return alone
