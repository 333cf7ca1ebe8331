"""What each rank fetches: its own shards of every step, or a ghost where it owns none."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.data.order import Order

Owned = Callable[[int, frozenset[int]], Sequence[int | None]]
"""Which shards a rank runs: see contracts.Strategy.owned."""


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """One micro-batch to fetch; the fields are MicroBatch's, without the samples themselves."""

    step: int
    shard: int
    epoch: int
    indices: tuple[int, ...]
    ghost: bool = False
    shards: int = 1
    present: frozenset[int] = frozenset()


def step_requests(order: Order, step: int, owned: Owned) -> list[ShardRequest]:
    """A rank's micro-batches of one step: its shards that hold samples.

    Where it has none left but others have, it gets a ghost: another's micro-batch, to run through every collective.
    """
    shards = order.shards(step)
    present = frozenset(shard for shard, rows in enumerate(shards) if len(rows))
    return [
        ShardRequest(
            step=step,
            shard=shard,
            epoch=order.epoch(step),
            indices=tuple(shards[shard].tolist()),
            ghost=mine is None,
            shards=len(shards),
            present=present,
        )
        for mine in owned(len(shards), present)
        for shard in [min(present) if mine is None else mine]
    ]


@dataclass(frozen=True, kw_only=True)
class TrainingRequests:
    """Every request of steps start..stop-1, a list per step; can be made anew for another world at any step."""

    order: Order
    owned: Owned
    start: int
    stop: int

    def __iter__(self) -> Iterator[ShardRequest]:
        for step in range(self.start, self.stop):
            yield from step_requests(self.order, step, self.owned)


@dataclass(frozen=True, kw_only=True)
class EvaluationRequests:
    """Every sample once over all ranks: micro-batches of similar length, dealt to the ranks in turn.

    Every rank gets equally many, the last of some being ghosts, so that a forward pass may hold collectives.
    """

    samples: int
    lengths: np.ndarray | None
    micro_batch: int
    rank: int
    world_size: int

    @property
    def total(self) -> int:
        """Micro-batches of the whole split, over all ranks."""
        return -(-self.samples // self.micro_batch)

    def __iter__(self) -> Iterator[ShardRequest]:
        rows = range(self.samples) if self.lengths is None else np.argsort(self.lengths, kind="stable").tolist()
        for place in range(0, self.total, self.world_size):
            number = min(place + self.rank, self.total - 1)
            indices = rows[number * self.micro_batch : (number + 1) * self.micro_batch]
            is_ghost = place + self.rank >= self.total
            yield ShardRequest(step=-1, shard=number, epoch=-1, indices=tuple(indices), ghost=is_ghost)
