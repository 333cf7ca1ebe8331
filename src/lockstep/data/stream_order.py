"""The order in which training takes the samples of a stream: block by block."""

from dataclasses import dataclass

import numpy as np

from lockstep.data.order import Order, mix, permuted


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a stream is shuffled, and cut into epochs."""

    size: int
    """B: samples that are shuffled together; 1 keeps the order of the stream."""
    samples: int
    """Of an epoch."""
    is_endless: bool
    """Whether the run is one epoch, which train.steps ends anywhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamOrder(Order):
    """Positions in a stream: those of epoch e are e N .. (e + 1) N - 1, each block of B permuted by itself.

    The last block of an epoch is shorter, but not that of an endless one: more steps do not change the first ones.
    """

    blocks: Blocks

    def _drawn(self, epoch: int, place: int, steps: int) -> np.ndarray:
        first = place * self.global_batch
        last = min(first + steps * self.global_batch, self.samples)
        rows = np.arange(first, last)
        size = self.blocks.size
        if size > 1:
            for number in range(first // size, -(-last // size)):
                start = number * size
                mine = rows[max(start - first, 0) : start + size - first]
                mine[:] = start + permuted(
                    mine - start,
                    seed=int(mix(np.array([self.seed], dtype=np.uint64) ^ np.uint64(number + 1))[0]),
                    epoch=epoch,
                    samples=size if self.blocks.is_endless else min(size, self.samples - start),
                )
        return epoch * self.samples + rows
