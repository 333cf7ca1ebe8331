"""Reduction of a bucket's partial sums: over the network, within machines first, or in memory that their ranks share.

n = elements of a bucket, L = ranks of a machine.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.distributed.process_group import further_group, world_group
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.topology import Topology, this_machine, topology
from lockstep.core.reduction.tree import TreeSum

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


class MachineFirstTransport(NetworkTransport):
    """Each rank of a machine adds 1/L of the bucket for all of them; then machines all-reduce: 1/L of the traffic."""

    def __init__(self, group: dist.ProcessGroup, neighbours: Topology) -> None:
        super().__init__(group)
        self.neighbours, self.ranks = neighbours, neighbours.ranks
        self._machine_reductions: dict[AllReduce, AllReduce] = {}

    def sum(self, bucket: int, slots: Sequence[Tensor], all_reduce: AllReduce) -> Tensor:
        machines = self._between_machines(all_reduce)
        here = AllReduce([all_reduce.owned[rank] for rank in self.ranks], all_reduce.present, self.neighbours.row_group)
        total = TreeSum(all_reduce.present, machines.local_nodes)
        for node, part in here.exchange(slots).items():
            total.add(node, part)
        numel = slots[0].numel()
        own = [total.partials[node] for node in machines.local_nodes]
        return here.gather(machines.sum(own or [slots[0].new_zeros(here.width(numel))]), numel)

    def _between_machines(self, all_reduce: AllReduce) -> AllReduce:
        """Return the all-reduce between machines, each of which owns the shards of its ranks."""
        if all_reduce not in self._machine_reductions:
            machines = self.neighbours.machines
            owned = [frozenset[int]().union(*(all_reduce.owned[rank] for rank in ranks)) for ranks in machines]
            self._machine_reductions[all_reduce] = AllReduce(owned, all_reduce.present, self.neighbours.column_group)
        return self._machine_reductions[all_reduce]


class SharedMemoryTransport(MachineFirstTransport):
    """Adds within a machine in shared memory. DDP's own buckets are moved there, so that nothing is copied."""

    def __init__(self, group: dist.ProcessGroup, neighbours: Topology) -> None:
        super().__init__(group, neighbours)
        self.rows: dict[int, list[list[Tensor]]] = {}
        """bucket -> slots of each rank of this machine; empty where they could not be shared."""
        self.own: dict[int, list[Tensor]] = {}
        """bucket -> slots of this rank."""

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
            return all_reduce.sum(slots)
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

    def _shared(self, own: list[Tensor]) -> list[list[Tensor]]:
        """Return the slots of this machine's ranks; none, on all ranks of all machines, where any cannot share."""
        size = sum(slot.nbytes for slot in own) * len(self.ranks)
        is_free = SHARED.is_dir() and shutil.disk_usage(SHARED).free >= FREE_FACTOR * size
        offered, rows = list[Offer](), list[list[Tensor]]()
        with suppress(*CANNOT_SHARE):
            offered = [_offer(slot) for slot in own] if is_free else []
        offers, me = all_gather_object(offered, self.group), dist.get_rank()
        with suppress(*CANNOT_SHARE):
            ranks = self.ranks if all(offers) else ()
            rows = [own if rank == me else [_opened(offer, own[0]) for offer in offers[rank]] for rank in ranks]
        return rows if all(all_gather_object(bool(rows), self.group)) else []


def _offer(tensor: Tensor) -> Offer:
    """Move a tensor's storage, under all of its views, to memory that other processes can map. Done by file descriptor
    because torch's named files in /dev/shm stay behind when a process is killed."""
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
    """Open the fastest transport for a device. Collective. On Gloo it has its own group, beside other collectives."""
    if dist.get_world_size() == 1:
        return NetworkTransport(world_group())
    if device.type == "cuda":
        neighbours = topology(this_machine(), backend=None, has_single=False)
        return MachineFirstTransport(world_group(), neighbours) if neighbours else NetworkTransport(world_group())
    group, neighbours = further_group(), topology(this_machine())
    return SharedMemoryTransport(group, neighbours) if neighbours else NetworkTransport(group)
