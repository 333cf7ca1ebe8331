"""How much memory a process needs, part by part, computed from what was measured of one micro-batch.

P = bytes of the weights, V = shards of a step, A = bytes that autograd keeps of a micro-batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import torch

from lockstep.checkpoint.writer import share
from lockstep.core.reduction.tree import Node, Shards, TreeSum
from lockstep.parallel.measurements import Measurements, Weight

LARGE_BYTES = 32 << 20
"""The C library (glibc's mallopt(3), M_MMAP_THRESHOLD) gives tensors of more than 32 MiB back to the system as soon as
they are freed; smaller ones stay with the process. On a CPU both therefore add up at their own worst moments."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process, by what they are for; the parts add up to what a step needs at its worst moment."""

    fixed: int
    """Python, torch, the data set; on a GPU its context."""
    parameters: int
    """Weights and buffers."""
    gradients: int
    """Whole gradients, or partial sums of them, that are held at once."""
    optimizer: int
    average: int
    """The moving average of the weights (train.ema)."""
    activations: int
    """What the forward and backward pass holds besides."""
    communication: int
    """Buffers of the exchange with other processes."""
    checkpoint: int
    """The copy of this process's share that checkpoints are written from."""
    start: int = 0
    """What the process needs at its start at the worst, before the first step: not a part of the sum."""

    @property
    def step(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self) if each.name != "start")

    @property
    def peak(self) -> int:
        """The most the process ever holds."""
        return max(self.step, self.start)


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """How many partial sums a rank holds while a step's micro-batches come in."""

    before: tuple[int, ...]
    """When each of them begins."""
    after: tuple[int, ...]
    """When each of them is done."""

    @property
    def most(self) -> int:
        return max(self.after)


@lru_cache(maxsize=256)
def held(rounds: tuple[tuple[int, ...], ...], present: Shards, goals: tuple[Node, ...]) -> HeldMemory:
    """What `runtime.tree_reduce` holds when these shards come in, round by round: it is asked, with numbers."""
    tree, before, after = TreeSum(present, goals), [], []
    for shards in rounds:
        before.append(len(tree.parts))
        for shard in shards:
            tree.add((shard, 1), torch.zeros(()))
        after.append(len(tree.parts))
    return HeldMemory(before=tuple(before), after=tuple(after))


def passes(
    facts: Measurements, weights: Sequence[Weight], blocks: Iterable[int], *, sums: HeldMemory, others: int = 0
) -> int:
    """Bytes of the worst moment of a rank's passes, beside what it holds between steps: partial sums of gradients,
    activations, fresh gradients.

    `weights`, `blocks`: those that the rank runs; `others`: activations of further micro-batches in flight.
    """
    split = (False, True) if facts.device == "cpu" else (False,)
    total = others + facts.working_bytes
    for is_large in split:
        some = [w for w in weights if w.is_trained and (len(split) == 1 or (w.bytes > LARGE_BYTES) == is_large)]
        own = [] if is_large else list(blocks)
        total += max(
            before * sum(w.bytes for w in some) + timeline(facts, some, own, keeps=after > before)
            for before, after in zip(sums.before, sums.after, strict=True)
        )
    return total


def timeline(facts: Measurements, weights: Sequence[Weight], blocks: Sequence[int], *, keeps: bool) -> int:
    """The worst moment of one forward and backward pass: going back, activations make room for gradients.

    A gradient that is not kept (it is added to another) is there for a moment, and so is autograd's copy of each.
    """
    kept = {block: facts.kept_bytes(block) for block in blocks}
    inner = {block: facts.inner_bytes(block) for block in blocks}
    worst, gradients = 0, 0
    for block in sorted({*blocks, *(w.block for w in weights)}, reverse=True):
        own = [w.bytes for w in weights if w.block == block]
        largest = max(own, default=0)
        fresh = gradients + sum(own) if keeps else largest
        worst = max(worst, sum(kept.values()) + inner.get(block, 0) + fresh + largest)
        gradients += sum(own)
        kept.pop(block, None)
    return worst


def copied(tensors: dict[str, int], copies: int) -> int:
    """Bytes of the largest share of a checkpoint, when so many ranks hold the same tensors: as the writer shares it."""
    meta = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in tensors.items()}
    return max(
        sum(tensors[name] for name in share(meta, rank, copies)) for rank in range(min(copies, len(tensors) or 1))
    )


def saved(facts: Measurements, weights: Sequence[Weight], *, average: bool) -> dict[str, int]:
    """Name -> bytes of what a checkpoint holds of some weights."""
    found = {f"model.{w.name}": w.bytes for w in weights}
    if average:
        found |= {f"ema.{w.name}": w.bytes for w in weights}
    for w in weights:
        if w.is_trained:
            whole, rest = divmod(round(facts.optimizer_ratio * w.bytes), w.bytes or 1)
            found |= {f"optimizer.{w.name}.{number}": w.bytes for number in range(whole)}
            found |= {f"optimizer.{w.name}.rest": rest}
    return found
