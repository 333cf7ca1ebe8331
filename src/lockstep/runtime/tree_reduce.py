"""Sums over shards in one fixed binary tree, whatever the number of processes: floating-point addition is not
associative, so the order of the additions has to belong to the shards and not to the ranks.

A node (start, size) stands for the shards start..start+size-1; size is a power of two that divides start. A shard
without samples is absent: a node with one present child is that child. Related: EasyScale (M. Li et al., SC'23).

V = shards, W = processes, n = numbers in a flat tensor.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Node = tuple[int, int]
Shards = frozenset[int]


def root(present: Shards) -> Node:
    """The smallest aligned node over all present shards that starts at 0."""
    return (0, 1 << max(max(present), 0).bit_length())


@lru_cache(maxsize=64)
def cover(owned: Shards, present: Shards) -> tuple[Node, ...]:
    """The fewest nodes that hold all present shards of `owned` and no other present shard, from left to right."""

    def inside(node: Node) -> list[Node]:
        start, size = node
        leaves = {shard for shard in present if start <= shard < start + size}
        if not leaves & owned:
            return []
        if leaves <= owned:
            return [node]
        half = size // 2
        return inside((start, half)) + inside((start + half, half))

    return tuple(inside(root(present)))


class TreeSum:
    """Adds up tensors by node; siblings are added as soon as both are there, so at most log2(V/W)+1 are kept.

    Which nodes come first does not matter: a + b and b + a are the same bits.
    """

    def __init__(self, present: Shards, nodes: Iterable[Node]) -> None:
        self.present, self.goals = present, frozenset(nodes)
        self.parts: dict[Node, Tensor] = {}
        self.peak = 0

    def add(self, node: Node, value: Tensor) -> None:
        """Take one node's sum; `value` may be added to in place from now on."""
        while node not in self.goals:
            start, size = node
            sibling = (start ^ size, size)
            if sibling in self.parts:
                value = self.parts.pop(sibling).add_(value)
            elif not self._is_empty(sibling):
                break
            node = (start & ~size, 2 * size)
        self.parts[node] = value
        self.peak = max(self.peak, len(self.parts))

    def take(self, node: Node) -> Tensor | None:
        """A node's sum, out of what has come of it: a shard may have had nothing to give (a parameter it does not
        use), and then nothing is added for it. None when no shard had anything."""
        if node in self.parts:
            return self.parts.pop(node)
        start, size = node
        if size == 1:
            return None
        halves = (self.take((start, size // 2)), self.take((start + size // 2, size // 2)))
        both = [half for half in halves if half is not None]
        return both[0].add_(both[1]) if len(both) == 2 else next(iter(both), None)

    def _is_empty(self, node: Node) -> bool:
        return not any(node[0] <= shard < node[0] + node[1] for shard in self.present)


def tree_sum(rows: Tensor, present: Shards) -> Tensor:
    """Sum of rows [V, ...] over the present shards, in the tree's order -> [...]."""
    top = root(present)
    total = TreeSum(present, [top])
    for shard in sorted(present):
        total.add((shard, 1), rows[shard].clone())
    return total.parts[top]


class Exchange:
    """How the ranks of a group finish one tree: who brings which nodes.

    `owned[r]` are the shards of rank r; a rank may own none and still takes part.
    """

    def __init__(self, owned: Sequence[Shards], present: Shards, group: dist.ProcessGroup) -> None:
        self.present, self.group = present, group
        self.rank, self.size = group.rank(), group.size()
        self.nodes = [cover(shards, present) for shards in owned]

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's partial sums, one flat [n] for each of its nodes in order -> the sum over all shards [n].

        The same bits on every rank: each finishes the tree for its own n/W numbers, then all gather.
        """
        if self.size == 1:
            return parts[0]
        return self._gather(self._scatter(parts), parts[0].numel())

    def _scatter(self, parts: Sequence[Tensor]) -> Tensor:
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
        return total.parts[top]

    def _gather(self, chunk: Tensor, count: int) -> Tensor:
        whole = chunk.new_empty(chunk.numel() * self.size)
        dist.all_gather_into_tensor(whole, chunk.contiguous(), group=self.group)
        return whole[:count]
