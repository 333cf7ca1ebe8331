"""Sums over shards in one fixed binary tree, whatever the number of processes: floating-point addition is not
associative, so the order of the additions has to belong to the shards and not to the ranks.

A node (start, size) stands for the shards start..start+size-1; size is a power of two that divides start. A shard
without samples is absent: a node with one present child is that child. Related: EasyScale (M. Li et al., SC'23).

V = shards, W = processes.
"""

from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor

Node = tuple[int, int]
Shards = frozenset[int]


def root(present: Shards) -> Node:
    """The smallest aligned node over all present shards that starts at 0."""
    return (0, 1 << max(present).bit_length())


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

    Which nodes come first does not matter: a + b and b + a are the same bits, and the left one is put first for the
    sake of two NaNs, of which processors keep the first one's bits.
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
                other = self.parts.pop(sibling)
                value = other.add_(value) if sibling < node else value.add_(other)
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
