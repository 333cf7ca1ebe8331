"""Which shards a rank runs in a step: a function of the step's shards and of the rank, nothing else.

V = shards of a step, of which those `present` hold samples.
"""

from collections.abc import Sequence

from lockstep.core.reduction.tree import Shards


def contiguous(rank: int, size: int, *, shards: int, present: Shards) -> list[int]:
    """The present ones of shards rank*V/size .. (rank+1)*V/size-1: neighbours, so that most additions are local.
    May be empty."""
    return [shard for shard in range(rank * shards // size, (rank + 1) * shards // size) if shard in present]


def contiguous_by_rank(size: int, *, shards: int, present: Shards) -> list[Shards]:
    """`contiguous` for every rank."""
    return [frozenset(contiguous(rank, size, shards=shards, present=present)) for rank in range(size)]


def strided(rank: int, size: int, shards: Sequence[int]) -> list[int | None]:
    """Every `size`-th of the given shards; None for ranks without one in the last round. The shards of a round are
    neighbours. At least one round."""
    rounds = max(1, -(-len(shards) // size))
    own: list[int | None] = [*shards[rank::size]]
    return own + [None] * (rounds - len(own))
