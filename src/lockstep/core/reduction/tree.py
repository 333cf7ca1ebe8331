"""Sums over shards in one fixed binary tree, whatever the number of processes, and which shards a rank runs.

Floating-point addition is not associative, so the order of additions is fixed by the shards, not by the ranks. A node
(start, size) stands for shards start..start+size-1; size is a power of two that divides start. A shard without samples
is absent; a node with one present child equals that child. Related: EasyScale (M. Li et al., SC'23).

V = shards of a step, of which those `present` hold samples; W = processes.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from torch import Tensor

Node = tuple[int, int]
Shards = frozenset[int]


def root(present: Shards) -> Node:
    """Return the smallest aligned node over all present shards that starts at 0."""
    return (0, 1 << max(present).bit_length())


@lru_cache(maxsize=64)
def cover(owned: Shards, present: Shards) -> tuple[Node, ...]:
    """Return the fewest nodes that hold all present shards of `owned` and no other one, from left to right."""

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
    """Adds tensors by node. Siblings are added as soon as both are present, so at most log2(V/W)+1 tensors are kept.

    The order of arrival does not matter: a + b and b + a have the same bits. The left sibling is put first because
    processors keep the bits of the first of two NaNs.
    """

    def __init__(self, present: Shards, targets: Iterable[Node]) -> None:
        self.present, self.targets = present, frozenset(targets)
        self.partials: dict[Node, Tensor] = {}

    def add(self, node: Node, value: Tensor) -> None:
        """Add one node's sum; `value` may be added to in place from now on."""
        while node not in self.targets:
            start, size = node
            sibling = (start ^ size, size)
            if sibling in self.partials:
                other = self.partials.pop(sibling)
                value = other.add_(value) if sibling < node else value.add_(other)
            elif any(sibling[0] <= shard < sibling[0] + size for shard in self.present):
                break
            node = (start & ~size, 2 * size)
        self.partials[node] = value

    def take(self, node: Node) -> Tensor | None:
        """Remove and return a node's sum, of those of its shards that added something; None where none did."""
        if node in self.partials:
            return self.partials.pop(node)
        start, size = node
        if size == 1:
            return None
        halves = (self.take((start, size // 2)), self.take((start + size // 2, size // 2)))
        both = [half for half in halves if half is not None]
        return both[0].add_(both[1]) if len(both) == 2 else next(iter(both), None)


def tree_sum(rows: Tensor, present: Shards) -> Tensor:
    """Sum rows [V, ...] over the present shards, in the tree's order -> [...]."""
    top = root(present)
    total = TreeSum(present, [top])
    for shard in sorted(present):
        total.add((shard, 1), rows[shard].clone())
    return total.partials[top]


def contiguous(rank: int, size: int, *, shards: int, present: Shards) -> list[int]:
    """List the present shards of rank*V/size .. (rank+1)*V/size-1: neighbours, for local additions. May be empty."""
    return [shard for shard in range(rank * shards // size, (rank + 1) * shards // size) if shard in present]


def contiguous_by_rank(size: int, shards: int) -> list[Shards]:
    """Return the shards of each rank where none is absent."""
    return [frozenset(range(rank * shards // size, (rank + 1) * shards // size)) for rank in range(size)]


def strided(rank: int, size: int, shards: Sequence[int]) -> list[int | None]:
    """Return every `size`-th of the given shards; None for ranks without one in the last round. The shards of a round
    are neighbours. At least one round."""
    rounds = max(1, -(-len(shards) // size))
    own: list[int | None] = [*shards[rank::size]]
    return own + [None] * (rounds - len(own))


def alone(rank: int, size: int, shards: Sequence[int]) -> list[int | None]:
    """Return shards as `strided` does, with a single one in each round. At least one round."""
    return [shard if number % size == rank else None for number, shard in enumerate(shards)] or [None]
