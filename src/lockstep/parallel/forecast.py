"""Forecast of a strategy: memory, traffic and time of the busiest process, for a number of processes.

A strategy's companion `strategies/_NAME_forecast.py` has `forecast(setting) -> Forecast`; it raises LaunchError or
ModelError where the strategy cannot run with this setting.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from lockstep.checkpoint.writer import assigned_names
from lockstep.core.distributed.bandwidth import Bandwidth
from lockstep.core.reduction.tree import Node, Shards, TreeSum, cover
from lockstep.parallel.measurements import Measurements, Seconds, Weight

OVERLAP = 0.6
"""The backward pass's fraction of a micro-batch's time, in which communication can be hidden where a core, or a GPU, is
free for it: it does about twice the work of the forward pass."""
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
    """Return the peak bytes of partial sums, activations and new gradients in a rank's passes. `weights`, `blocks`:
    those that the rank runs; `others`: activations of further micro-batches in flight."""
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
    """Return the peak bytes of a forward and backward pass; activations are freed as gradients are allocated. Without
    `keeps` a gradient is freed once it is added to another; autograd holds a copy of each for a moment."""
    kept = {block: facts.kept_bytes(block) for block in blocks}
    inner = {block: facts.blocks[block].saved_bytes if facts.recomputes else 0 for block in blocks}
    peak, gradients = 0, 0
    for block in sorted({*blocks, *(w.block for w in weights)}, reverse=True):
        own = [w.bytes for w in weights if w.block == block]
        largest = max(own, default=0)
        new = gradients + sum(own) if keeps else largest
        peak = max(peak, sum(kept.values()) + inner.get(block, 0) + new + largest)
        gradients += sum(own)
        kept.pop(block, None)
    return peak


@dataclass(frozen=True, kw_only=True)
class Cluster:
    world: int
    per_machine: int
    slots: int
    """Processes that a machine can run at the same time: its cores over run.threads, or its GPUs."""
    links: Bandwidth | None
    """Bandwidth measured on this machine; None for one process."""
    bandwidth: float | None
    """Bytes per second of the network, if the user gave it; else the measured loopback counts."""

    @property
    def machines(self) -> int:
        return -(-self.world // self.per_machine)

    @property
    def slowdown(self) -> float:
        """Factor by which work takes longer than with a core for each process."""
        return max(1.0, min(self.per_machine, self.world) / self.slots)

    def send_seconds(self, sent: float, path: str, *, messages: int = 0) -> float:
        """Return the seconds that a process takes to send so many bytes; `path`: the field of `links` that applies."""
        if not sent:
            return 0.0
        assert self.links is not None, "more than one process, but no links were measured"
        latency = messages * self.links.latency_seconds
        if self.bandwidth is not None:
            return sent / self.bandwidth + latency
        return (sent / getattr(self.links, path) + latency) * self.slowdown

    def collective_seconds(self, times: int) -> float:
        """Return the seconds of small collectives: the loss, the agreement whether to stop, a barrier."""
        return times * self.links.together_seconds * self.slowdown if self.world > 1 and self.links else 0.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step."""

    compute: float
    """Forward and backward passes."""
    fetch: float
    exchange: float
    """Communication that is not hidden behind the backward pass."""
    idle: float
    """A pipeline's bubble, unless another process uses the core."""
    update: float
    rest: float = 0.0
    """Further seconds of the steps of the strategy's trial; negative where these took less."""

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, kw_only=True)
class Setting:
    section: Any
    """The strategy's Config."""
    shards: int
    is_exact: bool
    """Whether gradients are added in the shards' tree."""
    has_average: bool
    facts: Measurements
    seconds: Seconds
    """Times measured with as many processes at once as run on a machine, or as it can run."""
    cluster: Cluster

    @property
    def present(self) -> Shards:
        """The shards of a full step."""
        return frozenset(range(self.shards))

    def memory(
        self,
        weights: Sequence[Weight],
        *,
        copies: int,
        gradients: int,
        activations: int,
        communication: int,
        building: int = 0,
    ) -> Memory:
        """Return the memory of a process with these local shards of weights, replicated on `copies` ranks. At the start
        it builds the whole model, and holds `building` bytes beside it."""
        facts, whole = self.facts, self.facts.bytes_of(weights)
        tensors = {"buffers": facts.buffer_bytes} | {f"model.{w.name}": w.bytes for w in weights}
        tensors |= {f"ema.{w.name}": w.bytes for w in weights if self.has_average}
        for w in weights:
            if w.is_trained:
                state, rest = divmod(round(facts.optimizer_ratio * w.bytes), w.bytes or 1)
                tensors |= {f"optimizer.{w.name}.{number}": w.bytes for number in range(state)}
                tensors |= {f"optimizer.{w.name}.rest": rest}
        return Memory(
            fixed=facts.fixed_bytes,
            parameters=whole + facts.buffer_bytes,
            gradients=gradients,
            optimizer=round(facts.bytes_of(weights, is_trained=True) * facts.optimizer_ratio),
            average=whole if self.has_average else 0,
            activations=activations,
            communication=communication,
            checkpoint=checkpoint_copy(tensors, copies) if facts.device == "cpu" else 0,
            start=facts.fixed_bytes + max(facts.build_bytes, facts.parameter_bytes + building),
        )

    def times(
        self,
        rounds: int,
        exchange: float,
        *,
        compute: float | None = None,
        idle: float = 0.0,
        updated_bytes: int | None = None,
    ) -> Times:
        """Return the times of a process that runs `rounds` micro-batches, and updates so many bytes of weights (all by
        default). `compute`: seconds of the passes, where they are not those of the whole model."""
        seconds, slower = self.seconds, self.cluster.slowdown
        fraction = 1.0 if updated_bytes is None else updated_bytes / max(self.facts.parameter_bytes, 1)
        return Times(
            compute=rounds * seconds.passes * slower if compute is None else compute,
            fetch=rounds * seconds.fetch * slower,
            exchange=exchange,
            idle=idle,
            update=seconds.update * slower * fraction,
        )

    def replica_traffic(self, weights: Sequence[Weight], *, replicas: int, nodes: int) -> tuple[int, float]:
        """Return bytes sent by a rank with so many nodes of the tree in the all-reduce over replicas, and seconds."""
        trained = self.facts.bytes_of(weights, is_trained=True)
        sent = round((nodes + 1) * (replicas - 1) / replicas * trained)
        return sent, self.cluster.send_seconds(sent, "pair", messages=2)

    def idle_notes(self, groups: int, noun: str = "processes") -> tuple[str, ...]:
        """Return a note where some of the processes, or replicas, have no shard."""
        return (f"{groups - self.shards} of {groups} {noun} have no micro-batch",) if groups > self.shards else ()


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of the process that needs most."""

    memory: Memory
    sent_bytes: int
    """Bytes sent in a step over sockets or the network."""
    shared_bytes: int = 0
    """Bytes of a step that are added up in memory shared by the processes of a machine."""
    times: Times
    turns: int = 1
    """Number of times in a step that the strategy does work whose time only a trial shows."""
    bubble: float = 0.0
    """The fraction of a step that a pipeline's stages are idle, if they take equally long and have a core each."""
    notes: tuple[str, ...] = ()


def checkpoint_copy(tensors: dict[str, int], copies: int) -> int:
    """Return the bytes of the largest share of a checkpoint, when `copies` ranks hold the same tensors."""
    meta = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in tensors.items()}
    ranks = range(min(copies, len(tensors) or 1))
    return max(sum(tensors[name] for name in assigned_names(meta, rank, copies)) for rank in ranks)
