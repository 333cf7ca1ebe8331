"""Table of the ranks of each machine, which add with each other first, so that less crosses between machines."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.distributed.process_group import own_group


@dataclass(frozen=True, kw_only=True)
class Topology:
    """M machines with L ranks each, as a table: each row is a machine."""

    machines: tuple[tuple[int, ...], ...]
    """Positions of each machine's ranks in the set of ranks, [M][L]."""
    row: int
    """Index of this rank's machine, 0..M-1."""
    column: int
    """This rank's index on its machine, 0..L-1."""
    row_group: dist.ProcessGroup
    """Ranks of this rank's machine."""
    column_group: dist.ProcessGroup
    """Ranks with the same index on each machine."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Positions of this machine's ranks."""
        return self.machines[self.row]


def topology(
    machine: str, *, sets: Sequence[Sequence[int]] | None = None, backend: str | None = "gloo", has_single: bool = True
) -> Topology | None:
    """Compute the topology of this rank's set of ranks from each rank's machine name. Collective.

    `sets` divides all ranks; by default, it is one set. `has_single`: whether a single machine counts. None, on all
    ranks, if in any set no two ranks share a machine, or machines have different numbers of ranks.
    """
    names, rank = all_gather_object(machine), dist.get_rank()
    sets = sets or [range(len(names))]
    tables = [_table([names[each] for each in ranks]) for ranks in sets]
    if any(table is None or (len(table) == 1 and not has_single) for table in tables):
        return None
    rows, columns = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for ranks, table in zip(sets, tables, strict=True):
        of_world = [tuple(ranks[position] for position in row) for row in table or ()]
        rows += of_world
        columns += zip(*of_world, strict=True)
    row_group, column_group = own_group(rows, backend=backend), own_group(columns, backend=backend)
    own = next(number for number, ranks in enumerate(sets) if rank in ranks)
    table, position = tables[own], sets[own].index(rank)
    assert table is not None
    row = next(number for number, positions in enumerate(table) if position in positions)
    column = table[row].index(position)
    return Topology(machines=table, row=row, column=column, row_group=row_group, column_group=column_group)


def _table(names: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    """Return the positions of each machine's ranks; None if they make no table of at least two columns."""
    machines = tuple(tuple(at for at, name in enumerate(names) if name == each) for each in dict.fromkeys(names))
    width = len(machines[0])
    return None if width == 1 or any(len(row) != width for row in machines) else machines


def this_machine() -> str:
    """Return a name that is equal for processes that see each other: a container's own network or PIDs make another."""
    unique = f"process {os.getpid()} of rank {dist.get_rank()}"
    if sys.platform != "linux":
        return unique
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])
    except OSError:
        return unique
