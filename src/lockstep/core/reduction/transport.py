"""How the gradients of a bucket come together: over the network, or in memory that the ranks of a machine share.

n = numbers in a bucket, L = ranks of a machine.
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
from lockstep.core.distributed.process_group import world_group
from lockstep.core.distributed.topology import Topology, this_machine, topology
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum

BLOCK = 1 << 17
"""Numbers that are added at once: what is read and written, a few times 512 KiB, stays in a core's cache."""
SHARED = Path("/dev/shm")
SPARE = 1.1
"""Memory has to be free for so many times what is to be shared: writing to a full /dev/shm kills the process."""


CANNOT_SHARE = (OSError, RuntimeError)
"""/dev/shm cannot be written, files cannot be opened any more, the system forbids a look at other processes."""


Offer = tuple[int, int, int]
"""Process, file descriptor in it, bytes."""


class NetworkTransport:
    """Partial sums travel over the network, from every rank to every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def slots(self, bucket: int, buffer: Tensor, count: int) -> list[Tensor]:
        """Where this rank's partial sums of a bucket go: `count` flat tensors [n], the first of them `buffer`."""
        return [buffer, *(torch.empty_like(buffer) for _ in range(count - 1))]

    def sum(self, bucket: int, slots: Sequence[Tensor], exchange: AllReduce) -> Tensor:
        """The sum over all shards [n], once the slots have been filled. Every rank calls it."""
        return exchange.sum(slots)


class SharedMemoryTransport(NetworkTransport):
    """The ranks of a machine add up where the gradients lie, each of them 1/L of the bucket; machines exchange what
    that comes to. DDP's own buckets are moved into shared memory for this, so that nothing is copied.
    """

    def __init__(self, group: dist.ProcessGroup, neighbours: Topology) -> None:
        super().__init__(group)
        self.neighbours = neighbours
        self.ranks = next(ranks for ranks in neighbours.machines if dist.get_rank() in ranks)
        self.rows: dict[int, list[list[Tensor]]] = {}
        """bucket -> slots of each rank of this machine; empty where they could not be shared."""
        self.own: dict[int, list[Tensor]] = {}
        """bucket -> slots of this rank."""
        self._exchanges: dict[AllReduce, AllReduce] = {}

    def slots(self, bucket: int, buffer: Tensor, count: int) -> list[Tensor]:
        """As `Wire.slots`, in shared memory. Buckets are shared when they are new, by all ranks at once."""
        # What `own` holds keeps its memory, so a bucket that DDP has rebuilt has another address, on every rank.
        if bucket not in self.own or self.own[bucket][0].data_ptr() != buffer.data_ptr():
            if bucket == 0:  # all buckets are new: there may be fewer of them
                self.own.clear()
                self.rows.clear()
            self.own[bucket] = super().slots(bucket, buffer, count)
            self.rows[bucket] = self._shared(self.own[bucket])
        return self.own[bucket]

    def sum(self, bucket: int, slots: Sequence[Tensor], exchange: AllReduce) -> Tensor:
        """As `Wire.sum`; the result lies in the first slot of every rank."""
        rows, place = self.rows[bucket], self.neighbours.column
        if not rows:
            return super().sum(bucket, slots, exchange)
        dist.barrier(self.neighbours.row_group)
        count = slots[0].numel()
        low, high = (count * edge // len(rows) for edge in (place, place + 1))
        size = BLOCK if len(self.neighbours.machines) == 1 else max(high - low, 1)
        for start in range(low, high, size):
            self._sum_block(slice(start, min(start + size, high)), rows, exchange)
        dist.barrier(self.neighbours.row_group)
        return slots[0]

    def _sum_block(self, block: slice, rows: list[list[Tensor]], exchange: AllReduce) -> None:
        """Add up the numbers of a block in the slots where they lie, and put the sum into the first slot of each."""
        across = self._across(exchange)
        goals = across.nodes[across.rank]
        total = TreeSum(exchange.present, goals)
        for rank, row in zip(self.ranks, rows, strict=True):
            for node, slot in zip(exchange.nodes[rank], row, strict=False):  # a ragged step may need fewer slots
                total.add(node, slot[block])
        value = across.sum([total.parts[node] for node in goals] or [rows[0][0][block]])
        for row in rows:
            target = row[0][block]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)

    def _across(self, exchange: AllReduce) -> AllReduce:
        """The exchange between machines: what a machine owns is what its ranks own."""
        if exchange not in self._exchanges:
            owned = [
                frozenset[int]().union(*(exchange.owned[rank] for rank in ranks)) for ranks in self.neighbours.machines
            ]
            self._exchanges[exchange] = AllReduce(owned, exchange.present, self.neighbours.column_group)
        return self._exchanges[exchange]

    def _shared(self, own: list[Tensor]) -> list[list[Tensor]]:
        """The slots of every rank of this machine, by place; none, on all ranks everywhere, where one cannot share."""
        size = sum(slot.nbytes for slot in own) * len(self.ranks)
        has_room = SHARED.is_dir() and shutil.disk_usage(SHARED).free >= SPARE * size
        offers = all_gather_object(_offered(own) if has_room else [], self.group)
        rows = self._rows(own, offers) if all(offers) else []
        return rows if all(all_gather_object(bool(rows), self.group)) else []

    def _rows(self, own: list[Tensor], offers: Sequence[list[Offer]]) -> list[list[Tensor]]:
        with suppress(*CANNOT_SHARE):
            return [
                own if rank == dist.get_rank() else [_opened(offer, own[0]) for offer in offers[rank]]
                for rank in self.ranks
            ]
        return []


def _offered(slots: list[Tensor]) -> list[Offer]:
    with suppress(*CANNOT_SHARE):
        return [_offer(slot) for slot in slots]
    return []


def _offer(memory: Tensor) -> Offer:
    """Move a tensor's storage, under all of its views, to memory that others can map; it has no name that could be left
    behind, and is gone with the last process that uses it."""
    descriptor, size = memory.untyped_storage()._share_fd_cpu_()
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
    """The quickest there is. Every rank has to call it.

    On Gloo it has a process group of its own, since it works beside a thread that may be in another collective.
    """
    if device.type == "cuda" or dist.get_world_size() == 1:
        return NetworkTransport(world_group())
    group, found = dist.new_group(backend="gloo"), topology(this_machine())
    return SharedMemoryTransport(group, found) if found else NetworkTransport(group)
