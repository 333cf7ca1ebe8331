"""Which shards a rank runs in a step: a function of the step's shards and of the rank's place, nothing else.

V = shards of a step, of which those `present` hold samples.
"""

from collections.abc import Sequence

from lockstep.core.reduction.tree import Shards


def contiguous(place: int, places: int, *, shards: int, present: Shards) -> list[int]:
    """The present ones of shards place*V/places .. (place+1)*V/places-1: a run of neighbours, so that most additions
    happen inside it. May be empty."""
    return [shard for shard in range(place * shards // places, (place + 1) * shards // places) if shard in present]


def strided(place: int, places: int, shards: Sequence[int]) -> list[int | None]:
    """Every `places`-th of the given shards; None for places without one in the last round. Each round is then a run of
    neighbours. At least one round."""
    rounds = max(1, -(-len(shards) // places))
    own: list[int | None] = [*shards[place::places]]
    return own + [None] * (rounds - len(own))
