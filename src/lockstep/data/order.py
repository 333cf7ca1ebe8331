"""Which samples each shard of each step holds: a pure function of the config and the data, O(1) to enter anywhere.

N = samples, G = global batch, m = micro-batch, V = ceil(G/m) shards of a step, S = ceil(N/G) steps of an epoch.
Steps count from 0 over the whole run: step s is step s % S of epoch s // S.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, uint64 [n] -> uint64 [n]; unlike a library's generator it can never change.

    Source: G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) + np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
        return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of an epoch: 0..samples-1, each once, int64 [N]."""
    key = mix(mix(np.array([seed], dtype=np.uint64)) ^ np.array([epoch], dtype=np.uint64))
    keys = mix(mix(np.arange(samples, dtype=np.uint64)) ^ key)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False  # it is kept and shared
    return order


@lru_cache(maxsize=8)
def spread(shards: int) -> tuple[int, ...]:
    """0..shards-1 in bit-reversed order: any run of shards holds its share of long, short and empty micro-batches."""
    bits = max(shards - 1, 1).bit_length()
    reversed_ = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return tuple(shard for shard in reversed_ if shard < shards)


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The whole run's order; nothing in it knows of processes."""

    seed: int
    samples: int
    global_batch: int
    micro_batch: int
    lengths: np.ndarray | None = None
    """Length of each sample [N]: within a step, a micro-batch then holds samples of similar length."""

    @property
    def steps_per_epoch(self) -> int:
        """S; the last step of an epoch holds what is left, which may be fewer samples than G."""
        return -(-self.samples // self.global_batch)

    @property
    def shards_per_step(self) -> int:
        """V."""
        return -(-self.global_batch // self.micro_batch)

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def shards(self, step: int) -> list[np.ndarray]:
        """Sample indices of each of the V shards of a step, V arrays of int64 [0..m]."""
        place = step % self.steps_per_epoch
        whole = permutation(self.seed, self.epoch(step), self.samples)
        rows = whole[place * self.global_batch : (place + 1) * self.global_batch]
        if self.lengths is not None:
            rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        out = [rows[:0]] * self.shards_per_step
        for number, shard in enumerate(spread(self.shards_per_step)):
            out[shard] = rows[number * self.micro_batch : (number + 1) * self.micro_batch]
        return out
