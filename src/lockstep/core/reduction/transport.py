"""Reduction of the partial sums of a bucket: over the network, or in memory that the ranks of a machine share.

n = elements of a bucket, L = ranks of a machine.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.distributed.process_group import further_group, own_group, world_group
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum


@dataclass(frozen=True, kw_only=True)
class Topology:
    """M machines with L ranks each, as a table: each row is a machine."""

    machines: tuple[tuple[int, ...], ...]
    """Ranks of each machine, [M][L]."""
    column: int
    """This rank's index on its machine, 0..L-1."""
    row_group: dist.ProcessGroup
    """Ranks of this rank's machine."""
    column_group: dist.ProcessGroup
    """Ranks with the same index on each machine."""


def topology(machine: str) -> Topology | None:
    """Compute the topology from each rank's machine name; None if no two ranks share a machine, or machines have
    different numbers of ranks. Collective."""
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
    """Return a name that is equal for two processes of one machine that can see each other: a container with its own
    network or PID namespace counts as a machine."""
    unique = f"process {os.getpid()} of rank {dist.get_rank()}"
    if sys.platform != "linux":
        return unique
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])
    except OSError:
        return unique


BLOCK = 1 << 17
"""Elements that are added at once: a few times 512 KiB stay in a core's cache."""
SHARED = Path("/dev/shm")
FREE_FACTOR = 1.1
"""Required ratio of free bytes to shared ones: writing to a full /dev/shm kills the process."""
CANNOT_SHARE = (OSError, RuntimeError)
"""Errors where /dev/shm is not writable, too many files are open, or access to other processes is forbidden."""

Offer = tuple[int, int, int]
"""Process id, file descriptor in it, bytes."""


class NetworkTransport:
    """Sends partial sums over the network, from every rank to every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def slots(self, bucket: int, buffer: Tensor, count: int) -> list[Tensor]:
        """Return memory for this rank's partial sums of a bucket: `count` flat tensors [n], the first `buffer`."""
        return [buffer, *(torch.empty_like(buffer) for _ in range(count - 1))]

    def sum(self, bucket: int, slots: Sequence[Tensor], all_reduce: AllReduce) -> Tensor:
        """Return the sum over all shards [n], once the slots are filled. Every rank calls it."""
        return all_reduce.sum(slots)


class SharedMemoryTransport(NetworkTransport):
    """Each rank of a machine adds 1/L of the bucket in shared memory; then the machines all-reduce the results.

    DDP's own buckets are moved into shared memory, so that nothing is copied.
    """

    def __init__(self, group: dist.ProcessGroup, neighbours: Topology) -> None:
        super().__init__(group)
        self.neighbours = neighbours
        self.ranks = next(ranks for ranks in neighbours.machines if dist.get_rank() in ranks)
        self.rows: dict[int, list[list[Tensor]]] = {}
        """bucket -> slots of each rank of this machine; empty where they could not be shared."""
        self.own: dict[int, list[Tensor]] = {}
        """bucket -> slots of this rank."""
        self._machine_reductions: dict[AllReduce, AllReduce] = {}

    def slots(self, bucket: int, buffer: Tensor, count: int) -> list[Tensor]:
        """Do as `NetworkTransport.slots`, in shared memory. All ranks share a new bucket at the same time."""
        # What `own` holds keeps its memory, so a bucket that DDP has rebuilt has another address, on every rank.
        if bucket not in self.own or self.own[bucket][0].data_ptr() != buffer.data_ptr():
            if bucket == 0:  # all buckets are new: there may be fewer of them
                self.own.clear()
                self.rows.clear()
            self.own[bucket] = super().slots(bucket, buffer, count)
            self.rows[bucket] = self._shared(self.own[bucket])
        return self.own[bucket]

    def sum(self, bucket: int, slots: Sequence[Tensor], all_reduce: AllReduce) -> Tensor:
        """Do as `NetworkTransport.sum`; the result is in the first slot of every rank."""
        rows, column = self.rows[bucket], self.neighbours.column
        if not rows:
            return super().sum(bucket, slots, all_reduce)
        dist.barrier(self.neighbours.row_group)
        count = slots[0].numel()
        low, high = (count * edge // len(rows) for edge in (column, column + 1))
        size = BLOCK if len(self.neighbours.machines) == 1 else max(high - low, 1)
        for start in range(low, high, size):
            self._sum_block(slice(start, min(start + size, high)), rows, all_reduce)
        dist.barrier(self.neighbours.row_group)
        return slots[0]

    def _sum_block(self, block: slice, rows: list[list[Tensor]], all_reduce: AllReduce) -> None:
        """Add a block of all slots in place, and copy the sum to the first slot of each rank."""
        machines = self._between_machines(all_reduce)
        total = TreeSum(all_reduce.present, machines.local_nodes)
        for rank, row in zip(self.ranks, rows, strict=True):
            for node, slot in zip(all_reduce.nodes[rank], row, strict=False):  # a ragged step may need fewer slots
                total.add(node, slot[block])
        value = machines.sum([total.partials[node] for node in machines.local_nodes] or [rows[0][0][block]])
        for row in rows:
            target = row[0][block]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)

    def _between_machines(self, all_reduce: AllReduce) -> AllReduce:
        """Return the all-reduce between machines, each of which owns the shards of its ranks."""
        if all_reduce not in self._machine_reductions:
            owned = [
                frozenset[int]().union(*(all_reduce.owned[rank] for rank in ranks))
                for ranks in self.neighbours.machines
            ]
            self._machine_reductions[all_reduce] = AllReduce(owned, all_reduce.present, self.neighbours.column_group)
        return self._machine_reductions[all_reduce]

    def _shared(self, own: list[Tensor]) -> list[list[Tensor]]:
        """Return the slots of every rank of this machine; none, on all ranks of all machines, where any cannot
        share."""
        size = sum(slot.nbytes for slot in own) * len(self.ranks)
        is_free = SHARED.is_dir() and shutil.disk_usage(SHARED).free >= FREE_FACTOR * size
        offers = all_gather_object(_offers(own) if is_free else [], self.group)
        rows = self._open_rows(own, offers) if all(offers) else []
        return rows if all(all_gather_object(bool(rows), self.group)) else []

    def _open_rows(self, own: list[Tensor], offers: Sequence[list[Offer]]) -> list[list[Tensor]]:
        with suppress(*CANNOT_SHARE):
            return [
                own if rank == dist.get_rank() else [_opened(offer, own[0]) for offer in offers[rank]]
                for rank in self.ranks
            ]
        return []


def _offers(slots: list[Tensor]) -> list[Offer]:
    with suppress(*CANNOT_SHARE):
        return [_offer(slot) for slot in slots]
    return []


def _offer(tensor: Tensor) -> Offer:
    """Move a tensor's storage, under all of its views, to memory that other processes can map.

    Done by file descriptor because torch's named files in /dev/shm stay behind when a process is killed.
    """
    descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
    return os.getpid(), descriptor, size


def _opened(offer: Offer, like: Tensor) -> Tensor:
    process, number, size = offer
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)
    return like.new_empty(0).set_(storage, 0, like.size(), (1,))


def transport(device: torch.device) -> NetworkTransport:
    """Open the fastest transport for a device. Collective.

    On Gloo it has a process group of its own, because its thread runs beside other collectives.
    """
    if device.type == "cuda" or dist.get_world_size() == 1:
        return NetworkTransport(world_group())
    group, neighbours = further_group(), topology(this_machine())
    return SharedMemoryTransport(group, neighbours) if neighbours else NetworkTransport(group)
