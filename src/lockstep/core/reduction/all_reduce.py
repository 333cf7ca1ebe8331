"""How ranks finish a tree over the network: each adds up its own part of the numbers, then all have all.

V = shards, W = processes, n = numbers in a flat tensor. The same bytes travel as in a ring all-reduce when V/W is a
power of two; otherwise a rank brings more than one partial sum.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.reduction.tree import Shards, TreeSum, cover, root


class AllReduce:
    """How the ranks of a group finish one tree: who brings which nodes.

    `owned[r]` are the shards of rank r; a rank may own none and still takes part.
    """

    def __init__(self, owned: Sequence[Shards], present: Shards, group: dist.ProcessGroup) -> None:
        self.owned, self.present, self.group = owned, present, group
        self.rank, self.size = group.rank(), group.size()
        self.room: Tensor | None = None
        self.nodes = [cover(shards, present) for shards in owned]
        """What each rank brings, one partial sum per node."""
        everything = frozenset[int]().union(*owned)
        self.slots = max(1, len(cover(owned[self.rank], everything)))
        """How many nodes this rank brings at most; where shards are absent it may be fewer."""

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's partial sums, one flat [n] for each of its nodes in order -> the sum over all shards [n].

        The same bits on every rank: each finishes the tree for its own n/W numbers, then all gather. `parts` may be
        overwritten; a rank without a node gives one tensor for its type and room.
        """
        if self.size == 1:
            return parts[0]
        return self._pairwise(parts) if parts[0].device.type == "cpu" else self._collective(parts)

    def _pairwise(self, parts: Sequence[Tensor]) -> Tensor:
        """Every rank sends every other its chunk, from where it lies, and later its own sum, to where it belongs."""
        edges = [parts[0].numel() * rank // self.size for rank in range(self.size + 1)]
        chunks = [slice(*pair) for pair in pairwise(edges)]
        mine, others = chunks[self.rank], [rank for rank in range(self.size) if rank != self.rank]
        rows = {node: part[mine] for node, part in zip(self.nodes[self.rank], parts, strict=False)}
        arriving = [(rank, node) for rank in others for node in self.nodes[rank]]
        rows |= dict(zip((node for _, node in arriving), self._room(parts[0], len(arriving), mine), strict=True))
        self._move(
            sends=[(part[chunks[rank]], rank) for rank in others for part in parts[: len(self.nodes[self.rank])]],
            receives=[(rows[node], rank) for rank, node in arriving],
        )
        top = root(self.present)
        total = TreeSum(self.present, [top])
        for node, row in rows.items():
            total.add(node, row)
        whole = parts[0]
        if total.parts[top].data_ptr() != whole[mine].data_ptr():
            whole[mine].copy_(total.parts[top])
        self._move(
            sends=[(whole[mine], rank) for rank in others], receives=[(whole[chunks[rank]], rank) for rank in others]
        )
        return whole

    def _room(self, like: Tensor, count: int, chunk: slice) -> Tensor:
        """Memory for `count` chunks, kept from one bucket to the next: fresh pages cost as much as the sum."""
        width = chunk.stop - chunk.start
        if self.room is None or self.room.numel() < count * width or self.room.dtype != like.dtype:
            self.room = like.new_empty(count * width)
        return self.room[: count * width].view(count, width)

    def _move(self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> None:
        """Between two ranks messages arrive in the order in which they were sent."""
        works = [dist.irecv(tensor, group=self.group, group_src=rank) for tensor, rank in receives if tensor.numel()]
        works += [dist.isend(tensor, group=self.group, group_dst=rank) for tensor, rank in sends if tensor.numel()]
        for work in works:
            assert work is not None
            work.wait()

    def _collective(self, parts: Sequence[Tensor]) -> Tensor:
        """The same in two collectives, which NCCL puts on a stream; chunks are padded to one size."""
        mine = self.nodes[self.rank]
        width = -(-parts[0].numel() // self.size)
        padding = width * self.size - parts[0].numel()
        rows = torch.stack([F.pad(part, (0, padding)) for part in parts[: len(mine)]]) if mine else parts[0][:0]
        send = rows.view(len(mine), self.size, width).transpose(0, 1).reshape(-1)
        counts = [len(nodes) for nodes in self.nodes]
        received = parts[0].new_empty(sum(counts) * width)
        dist.all_to_all_single(
            received, send, [c * width for c in counts], [len(mine) * width] * self.size, group=self.group
        )
        top = root(self.present)
        total = TreeSum(self.present, [top])
        for node, row in zip((n for nodes in self.nodes for n in nodes), received.view(-1, width), strict=True):
            total.add(node, row)
        whole = parts[0].new_empty(width * self.size)
        dist.all_gather_into_tensor(whole, total.parts[top].contiguous(), group=self.group)
        return whole[: parts[0].numel()]
