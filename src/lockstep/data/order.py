"""Samples of each shard of each step: a pure function of config and data, with random access by step; of a stream,
block by block.

N = samples, G = global batch, m = micro-batch, V = ceil(G/m) shards of a step, S = ceil(N/G) steps of an epoch.
Steps count from 0 over the whole run: step s is step s % S of epoch s // S.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
HALF = np.uint64(32)
ROUNDS, SMALL_ROUNDS, SMALL = 8, 20, 1024
"""Rounds of the permutation; more for few samples: over 36,000 epochs, 6 samples show a pattern with 8 rounds, and none
with 12 (tests/unit/data/test_order.py)."""
CHUNK = 8192
"""Positions permuted at a time, which fit in the CPU cache."""
MAX_CACHED = 1 << 20
"""Most samples for which an epoch's order (8 MiB) is cached; that of more is computed for each step, in 0.3 ms."""


def mix(numbers: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's output function, uint64 [n] -> [n]; a library's generator might change with its version.
    Source: G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) + np.uint64(GOLDEN)
        z ^= z >> np.uint64(30)
        z *= np.uint64(MIX_1)
        z ^= z >> np.uint64(27)
        z *= np.uint64(MIX_2)
        z ^= z >> np.uint64(31)
        return z


def permuted(positions: np.ndarray, *, seed: int, epoch: int, samples: int) -> np.ndarray:
    """Return the samples at these positions of an epoch's order, int64 [n] in 0..N-1; a permutation of 0..N-1.

    Each position is computed independently, in O(n) memory for any N. A Feistel network on a grid of A x B >= N cells
    adds to each coordinate, in turn, a hash of the other; a result >= N goes through it again. A is even, or odd
    permutations would be impossible. Source: J. Black, P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """
    key = mix(mix(np.array([seed], dtype=np.uint64)) ^ np.array([epoch], dtype=np.uint64))
    rounds = ROUNDS if samples > SMALL else SMALL_ROUNDS
    keys = mix(key ^ np.arange(1, rounds + 1, dtype=np.uint64))
    height = 2 * ((math.isqrt(samples - 1) + 2) // 2)
    width = -(-samples // height)
    out = np.asarray(positions).astype(np.uint64)
    for start in range(0, len(out), CHUNK):
        chunk = out[start : start + CHUNK]
        chunk[:] = _shuffled(chunk, keys, (height, width))
        while len(beyond := np.flatnonzero(chunk >= samples)):
            chunk[beyond] = _shuffled(chunk[beyond], keys, (height, width))
    return out.view(np.int64)


def _shuffled(cells: np.ndarray, keys: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Permute the cells of a grid [height, width], numbered row by row, uint64 [n]."""
    sizes = np.array(grid, dtype=np.uint64)
    row, column = np.divmod(cells, sizes[1])
    for number in range(0, len(keys), 2):
        _add_hash(row, column ^ keys[number], sizes[0])
        _add_hash(column, row ^ keys[number + 1], sizes[1])
    row *= sizes[1]
    row += column
    return row


def _add_hash(coordinate: np.ndarray, keyed: np.ndarray, size: np.uint64) -> None:
    """Add a hash of `keyed` to a coordinate 0..size-1, in place, modulo size (< 2^32)."""
    added = mix(keyed)
    added >>= HALF
    added *= size
    added >>= HALF
    coordinate += added
    np.subtract(coordinate, size, out=coordinate, where=coordinate >= size)


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    """Return the whole order of an epoch: 0..samples-1, each once, int64 [N]."""
    order = permuted(np.arange(samples), seed=seed, epoch=epoch, samples=samples)
    order.flags.writeable = False  # cached and shared
    return order


@lru_cache(maxsize=8)
def bit_reversed(shards: int) -> tuple[int, ...]:
    """Return 0..shards-1 in bit-reversed order: any range has its share of long, short and empty micro-batches."""
    bits = max(shards - 1, 1).bit_length()
    numbers = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return tuple(shard for shard in numbers if shard < shards)


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Sample order of the whole run, independent of the number of processes."""

    seed: int
    samples: int
    global_batch: int
    micro_batch: int
    lengths: np.ndarray | None = None
    """Length of each sample [N]; if given, a step holds samples of similar length, and so does each of its shards."""
    window: int = 1
    """K: the samples of this many steps are sorted by length together, then cut into steps, in random order."""
    mixed: Callable[[int, np.ndarray], np.ndarray] | None = None
    """(epoch, numbers in 0..N-1) -> their samples, where several sources are mixed: see Mixture.rows."""
    _kept: tuple[int, int, np.ndarray] | None = field(default=None, init=False, repr=False)
    """The newest window: its epoch, its number and its samples, sorted by length."""

    @property
    def steps_per_epoch(self) -> int:
        """S; the last step of an epoch may hold fewer samples than G."""
        return -(-self.samples // self.global_batch)

    @property
    def shards_per_step(self) -> int:
        return -(-self.global_batch // self.micro_batch)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step, from 0."""
        return step // self.steps_per_epoch

    def samples_at(self, step: int) -> int:
        """Return the number of samples seen after `step` steps."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.samples + min(steps * self.global_batch, self.samples)

    def shards(self, step: int) -> list[np.ndarray]:
        """Return the sample indices of each of the V shards of a step, V arrays of int64 [0..m]."""
        epoch, place = self.epoch(step), step % self.steps_per_epoch
        rows = self._drawn(epoch, place, 1) if self.lengths is None else self._of_window(epoch, place)
        out = [rows[:0]] * self.shards_per_step
        for number, shard in enumerate(bit_reversed(self.shards_per_step)):
            out[shard] = rows[number * self.micro_batch : (number + 1) * self.micro_batch]
        return out

    def first_use(self, samples: np.ndarray, stop: int) -> int | None:
        """Return the first step below `stop` that has any of these samples; None where none has."""
        steps = range(stop if len(samples) else 0)
        return next((step for step in steps if np.isin(np.concatenate(self.shards(step)), samples).any()), None)

    def _drawn(self, epoch: int, place: int, steps: int) -> np.ndarray:
        """Return the samples of `steps` steps from step `place` of an epoch on, regardless of their lengths."""
        first = place * self.global_batch
        last = min(first + steps * self.global_batch, self.samples)
        if self.samples <= MAX_CACHED:
            rows = permutation(self.seed, epoch, self.samples)[first:last]
        else:
            rows = permuted(np.arange(first, last), seed=self.seed, epoch=epoch, samples=self.samples)
        return rows if self.mixed is None else self.mixed(epoch, rows)

    def _of_window(self, epoch: int, place: int) -> np.ndarray:
        """Return the samples of step `place` of an epoch, sorted by length.

        The sorted samples of its window are cut into batches of G, and the batches are visited in random order. Where
        the last step of an epoch is a smaller one, its samples are neighbours too, from a random place.
        """
        number, place = divmod(place, self.window)
        rows = self._sorted_window(epoch, number)
        full, rest = divmod(len(rows), self.global_batch)
        seed = int(mix(np.array([self.seed], dtype=np.uint64) ^ np.uint64(number + 1))[0])
        gap = int(permuted(np.array([0]), seed=seed, epoch=epoch, samples=full + 1)[0]) if rest else full
        if place == full:
            return rows[gap * self.global_batch :][:rest]
        batch = int(permuted(np.array([place]), seed=seed, epoch=epoch, samples=full)[0])
        return rows[batch * self.global_batch + (rest if batch >= gap else 0) :][: self.global_batch]

    def _sorted_window(self, epoch: int, number: int) -> np.ndarray:
        """Return the samples of a window, sorted by length; cached, since all its steps need them."""
        assert self.lengths is not None
        kept = self._kept
        if kept is None or kept[:2] != (epoch, number):
            rows = self._drawn(epoch, number * self.window, self.window)
            kept = epoch, number, rows[np.argsort(self.lengths[rows], kind="stable")]
            kept[2].flags.writeable = False  # shared by all steps
            object.__setattr__(self, "_kept", kept)  # it follows from the other fields
        return kept[2]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a stream is shuffled, and cut into epochs."""

    size: int
    """B: samples that are shuffled together; 1 keeps the order of the stream."""
    samples: int
    """Number of samples of an epoch."""
    is_endless: bool
    """Whether the run is one epoch, which train.steps ends anywhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamOrder(Order):
    """Positions in a stream: those of epoch e are e N .. (e + 1) N - 1, each block of B permuted by itself. The last
    block of an epoch is shorter, but not that of an endless one: more steps do not change the first ones."""

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
