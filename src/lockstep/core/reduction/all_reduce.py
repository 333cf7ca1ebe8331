"""An all-reduce that finishes the shards' tree: each rank reduces its own chunk, then all gather the chunks.

V = shards, W = processes, n = elements of a flat tensor. The same bytes travel as in a ring all-reduce when V/W is a
power of two; otherwise a rank contributes more than one partial sum.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.distributed.collectives import wait_for
from lockstep.core.reduction.tree import Node, Shards, TreeSum, cover, root


class AllReduce:
    """The all-reduce of one kind of step over a process group: which rank contributes which nodes of the tree.
    `owned[r]` are the shards of rank r; a rank may own none and still takes part."""

    def __init__(self, owned: Sequence[Shards], present: Shards, group: dist.ProcessGroup) -> None:
        self.owned, self.present, self.group = owned, present, group
        self.rank, self.size = group.rank(), group.size()
        self.nodes = [cover(shards, present) for shards in owned]
        """Nodes of each rank: one partial sum each."""
        self.max_nodes = max(1, len(cover(owned[self.rank], frozenset[int]().union(*owned))))
        """Number of nodes of this rank when no shard is absent; otherwise it may have fewer."""
        self._buffer: Tensor | None = None

    @property
    def local_nodes(self) -> tuple[Node, ...]:
        return self.nodes[self.rank]

    def sum(self, partials: Sequence[Tensor]) -> Tensor:
        """Reduce this rank's partial sums, one flat [n] for each of its nodes in order -> the sum over all shards [n].

        The same bits on every rank. `partials` may be overwritten; a rank without a node passes one tensor of its type.
        """
        if self.size == 1:
            return partials[0]
        return self._point_to_point(partials) if partials[0].device.type == "cpu" else self._collective(partials)

    def _point_to_point(self, partials: Sequence[Tensor]) -> Tensor:
        """Send and receive chunks in place, without the copies that Gloo's collectives would need."""
        edges = [partials[0].numel() * rank // self.size for rank in range(self.size + 1)]
        chunks = [slice(*pair) for pair in pairwise(edges)]
        mine, others = chunks[self.rank], [rank for rank in range(self.size) if rank != self.rank]
        rows = {node: partial[mine] for node, partial in zip(self.local_nodes, partials, strict=False)}
        remote = [(rank, node) for rank in others for node in self.nodes[rank]]
        received = self._receive_buffer(partials[0], len(remote), mine.stop - mine.start)
        rows |= {node: row for (_, node), row in zip(remote, received, strict=True)}
        self._transfer(
            sends=[(part[chunks[rank]], rank) for rank in others for part in partials[: len(self.local_nodes)]],
            receives=[(rows[node], rank) for rank, node in remote],
        )
        result, total = partials[0], self._tree_sum(rows)
        if total.data_ptr() != result[mine].data_ptr():
            result[mine].copy_(total)
        receives = [(result[chunks[rank]], rank) for rank in others]
        self._transfer(sends=[(result[mine], rank) for rank in others], receives=receives)
        return result

    def _tree_sum(self, rows: dict[Node, Tensor]) -> Tensor:
        top = root(self.present)
        total = TreeSum(self.present, [top])
        for node, row in rows.items():
            total.add(node, row)
        return total.partials[top]

    def _receive_buffer(self, like: Tensor, count: int, width: int) -> Tensor:
        """Return rows [count, width] of a buffer for all buckets: page faults of new memory cost as much as the sum."""
        if self._buffer is None or self._buffer.numel() < count * width or self._buffer.dtype != like.dtype:
            self._buffer = like.new_empty(count * width)
        return self._buffer[: count * width].view(count, width)

    def _transfer(self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> None:
        """Send and receive; between two ranks messages arrive in the order in which they were sent."""
        group, started = self.group, list[tuple[dist.Work | None, Tensor]]()
        started += [(dist.irecv(each, group=group, group_src=rank), each) for each, rank in receives if each.numel()]
        started += [(dist.isend(each, group=group, group_dst=rank), each) for each, rank in sends if each.numel()]
        for work, tensor in started:
            wait_for(work, tensor, group)

    def _collective(self, partials: Sequence[Tensor]) -> Tensor:
        """Use an all-to-all and an all-gather, which NCCL runs on a stream; chunks are padded to one size."""
        return self.gather(self._tree_sum(self.exchange(partials)), partials[0].numel())

    def width(self, numel: int) -> int:
        """Return the number of elements of a chunk."""
        return -(-numel // self.size)

    def exchange(self, partials: Sequence[Tensor]) -> dict[Node, Tensor]:
        """Send each rank its chunk of this rank's partial sums -> this rank's chunk of every rank's nodes."""
        count, width = len(self.local_nodes), self.width(partials[0].numel())
        padded = [F.pad(partial, (0, width * self.size - partial.numel())) for partial in partials[:count]]
        rows = torch.stack(padded) if padded else partials[0][:0]
        send = rows.view(count, self.size, width).transpose(0, 1).reshape(-1)
        counts = [len(nodes) for nodes in self.nodes]
        received = partials[0].new_empty(sum(counts) * width)
        dist.all_to_all_single(received, send, [c * width for c in counts], [count * width] * self.size, self.group)
        nodes = [node for nodes in self.nodes for node in nodes]
        return dict(zip(nodes, received.view(-1, width), strict=True))

    def gather(self, chunk: Tensor, numel: int) -> Tensor:
        """Gather every rank's chunk -> [numel]."""
        result = chunk.new_empty(chunk.numel() * self.size)
        dist.all_gather_into_tensor(result, chunk.contiguous(), group=self.group)
        return result[:numel]
