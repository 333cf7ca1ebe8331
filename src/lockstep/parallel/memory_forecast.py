"""Memory that a process needs, by purpose, computed from the measurements of one micro-batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import torch

from lockstep.checkpoint.writer import assigned_names
from lockstep.core.reduction.tree import Node, Shards, TreeSum, cover
from lockstep.parallel.measurements import Measurements, Weight

LARGE_BYTES = 32 << 20
"""The C library (glibc's mallopt(3), M_MMAP_THRESHOLD) returns freed tensors above this size to the system and keeps
smaller ones. On a CPU the peaks of both therefore add up, even when they are at different times."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process by purpose; their sum is the peak of a step."""

    fixed: int
    """Python, torch, the data set; on a GPU its context."""
    parameters: int
    """Weights and buffers."""
    gradients: int
    """Gradients, or partial sums of them."""
    optimizer: int
    average: int
    """The moving average of the weights (train.ema)."""
    activations: int
    """Everything else that forward and backward passes allocate."""
    communication: int
    checkpoint: int
    """The copy of this process's share of a checkpoint."""
    start: int = 0
    """The peak before the first step; not part of the sum."""

    @property
    def step(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self) if each.name != "start")

    @property
    def peak(self) -> int:
        return max(self.step, self.start)


@dataclass(frozen=True, kw_only=True)
class PartialSums:
    """Numbers of partial sums of gradients that a rank keeps, by round of a step."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def most(self) -> int:
        return max(self.after)


ADDED_AT_ONCE = PartialSums(before=(0, 1), after=(1, 1))
"""Gradients that are accumulated in place."""


@lru_cache(maxsize=256)
def partial_sums(rounds: tuple[tuple[int, ...], ...], present: Shards, nodes: tuple[Node, ...]) -> PartialSums:
    """Return the numbers of partial sums in a TreeSum when these shards are added round by round."""
    tree, before, after = TreeSum(present, nodes), [], []
    for shards in rounds:
        before.append(len(tree.partials))
        for shard in shards:
            tree.add((shard, 1), torch.zeros(()))
        after.append(len(tree.partials))
    return PartialSums(before=tuple(before), after=tuple(after))


def sequential_sums(shards: Iterable[int], present: Shards) -> PartialSums:
    """Return the numbers of partial sums of a rank that runs these shards one after the other."""
    own = sorted(shards)
    return partial_sums(tuple((shard,) for shard in own), present, cover(frozenset(own), present))


def peak_of_passes(
    facts: Measurements, weights: Sequence[Weight], blocks: Iterable[int], *, sums: PartialSums, others: int = 0
) -> int:
    """Return the peak bytes of partial sums, activations and new gradients in a rank's passes.

    `weights`, `blocks`: those that the rank runs; `others`: activations of further micro-batches in flight.
    """
    by_size = (False, True) if facts.device == "cpu" else (False,)
    total = others + facts.working_bytes
    for is_large in by_size:
        some = [w for w in weights if w.is_trained and (len(by_size) == 1 or (w.bytes > LARGE_BYTES) == is_large)]
        own = [] if is_large else list(blocks)
        total += max(
            before * sum(w.bytes for w in some) + peak_of_pass(facts, some, own, keeps=after > before)
            for before, after in zip(sums.before, sums.after, strict=True)
        )
    return total


def peak_of_pass(facts: Measurements, weights: Sequence[Weight], blocks: Sequence[int], *, keeps: bool) -> int:
    """Return the peak bytes of a forward and backward pass; activations are freed as gradients are allocated.

    Without `keeps` a gradient is freed once it is added to another; autograd holds a copy of each for a moment.
    """
    kept = {block: facts.kept_bytes(block) for block in blocks}
    inner = {block: facts.inner_bytes(block) for block in blocks}
    peak, gradients = 0, 0
    for block in sorted({*blocks, *(w.block for w in weights)}, reverse=True):
        own = [w.bytes for w in weights if w.block == block]
        largest = max(own, default=0)
        new = gradients + sum(own) if keeps else largest
        peak = max(peak, sum(kept.values()) + inner.get(block, 0) + new + largest)
        gradients += sum(own)
        kept.pop(block, None)
    return peak


def checkpoint_copy(tensors: dict[str, int], copies: int) -> int:
    """Return the bytes of the largest share of a checkpoint, when `copies` ranks hold the same tensors."""
    meta = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in tensors.items()}
    ranks = range(min(copies, len(tensors) or 1))
    return max(sum(tensors[name] for name in assigned_names(meta, rank, copies)) for rank in ranks)


def checkpoint_tensors(facts: Measurements, weights: Sequence[Weight], *, average: bool) -> dict[str, int]:
    """Return name -> bytes of a checkpoint's tensors for some weights."""
    tensors = {f"model.{w.name}": w.bytes for w in weights}
    if average:
        tensors |= {f"ema.{w.name}": w.bytes for w in weights}
    for w in weights:
        if w.is_trained:
            whole, rest = divmod(round(facts.optimizer_ratio * w.bytes), w.bytes or 1)
            tensors |= {f"optimizer.{w.name}.{number}": w.bytes for number in range(whole)}
            tensors |= {f"optimizer.{w.name}.rest": rest}
    return tensors
