"""Forecast of a strategy: memory, traffic and time of the busiest process, for a number of processes.

W = processes, V = shards of a step. A strategy's companion `strategies/_NAME_forecast.py` has `forecast(setting) ->
Forecast`; it raises LaunchError or ModelError where the strategy cannot run with this setting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.core.distributed.bandwidth import Bandwidth
from lockstep.core.reduction.tree import Shards
from lockstep.parallel.measurements import Measurements, Seconds, Weight
from lockstep.parallel.memory_forecast import Memory, checkpoint_copy, checkpoint_tensors

OVERLAP = 0.6
"""The backward pass's fraction of a micro-batch's time, in which communication can be hidden where a core, or a GPU, is
free for it: it does about twice the work of the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes and what they run on."""

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
        if self.world == 1 or self.links is None:
            return 0.0
        return times * self.links.together_seconds * self.slowdown


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
    """Input of a forecast."""

    section: Any
    """The strategy's Config."""
    shards: int
    """V, shards of a step."""
    is_exact: bool
    """Whether gradients are added in the shards' tree."""
    has_average: bool
    """Whether a moving average of the weights is kept."""
    facts: Measurements
    seconds: Seconds
    """Times measured with as many processes at once as run on a machine, or as it can run."""
    cluster: Cluster

    @property
    def present(self) -> Shards:
        """The shards of a full step."""
        return frozenset(range(self.shards))

    def persistent_memory(self, weights: Sequence[Weight], *, copies: int) -> dict[str, int]:
        """Return the fields of Memory that stay between steps: for the local shards of weights, replicated on `copies`
        ranks."""
        facts = self.facts
        trained = facts.bytes_of(weights, is_trained=True)
        tensors = checkpoint_tensors(facts, weights, average=self.has_average) | {"buffers": facts.buffer_bytes}
        return {
            "fixed": facts.fixed_bytes,
            "parameters": facts.bytes_of(weights) + facts.buffer_bytes,
            "optimizer": round(trained * facts.optimizer_ratio),
            "average": facts.bytes_of(weights) if self.has_average else 0,
            "checkpoint": checkpoint_copy(tensors, copies) if facts.device == "cpu" else 0,
        }

    def start_bytes(self, more: int = 0) -> int:
        """Return the bytes at the start, when every process has built the whole model, and `more`."""
        return self.facts.fixed_bytes + max(self.facts.build_bytes, self.facts.parameter_bytes + more)

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
    notes: tuple[str, ...] = field(default=())
