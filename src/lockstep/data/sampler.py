"""Batch samplers: the micro-batches that each rank fetches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.data.order import Order

Owned = Callable[[int, frozenset[int]], Sequence[int | None]]
"""Function that returns a rank's shards: see Strategy.owned."""


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """One micro-batch to fetch; fields as in MicroBatch."""

    step: int
    shard: int
    epoch: int
    indices: tuple[int, ...]
    ghost: bool = False
    shards: int = 1
    present: frozenset[int] = frozenset()


def step_requests(order: Order, step: int, owned: Owned) -> list[ShardRequest]:
    """Return the requests of a rank for one step: its shards that are not empty. A rank whose shards are all empty gets
    a ghost, another rank's micro-batch, so that it joins every collective."""
    shards = order.shards(step)
    present = frozenset(shard for shard, rows in enumerate(shards) if len(rows))
    return [
        ShardRequest(
            step=step,
            shard=shard,
            epoch=order.epoch(step),
            indices=tuple(shards[shard].tolist()),
            ghost=own is None,
            shards=len(shards),
            present=present,
        )
        for own in owned(len(shards), present)
        for shard in [min(present) if own is None else own]
    ]


@dataclass(frozen=True, kw_only=True)
class TrainingRequests:
    """The requests of steps start..stop-1, step by step."""

    order: Order
    owned: Owned
    start: int
    stop: int
    again: Callable[[int], Owned | None] = lambda _: None
    """Step -> the shards that this rank runs when the step is run once more, if it is (observe.recheck)."""

    def __iter__(self) -> Iterator[ShardRequest]:
        for step in range(self.start, self.stop):
            yield from step_requests(self.order, step, self.owned)
            if (owned := self.again(step)) is not None:
                yield from step_requests(self.order, step, owned)


@dataclass(frozen=True, kw_only=True)
class EvaluationRequests:
    """Every sample once over all ranks: micro-batches of similar lengths, distributed round-robin. Every rank gets the
    same number; ghosts fill up, so that a forward pass may contain collectives."""

    samples: int
    lengths: np.ndarray | None
    micro_batch: int
    rank: int
    world_size: int

    @property
    def total(self) -> int:
        """Micro-batches of the split, over all ranks."""
        return -(-self.samples // self.micro_batch)

    def __iter__(self) -> Iterator[ShardRequest]:
        rows = None if self.lengths is None else np.argsort(self.lengths, kind="stable")
        for first in range(0, self.total, self.world_size):
            number = min(first + self.rank, self.total - 1)
            places = range(self.samples)[number * self.micro_batch : (number + 1) * self.micro_batch]
            indices = tuple(places if rows is None else rows[places.start : places.stop].tolist())
            yield ShardRequest(step=-1, shard=number, epoch=-1, indices=indices, ghost=first + self.rank >= self.total)
