"""What a strategy forecasts of itself: memory, traffic and time of the busiest process, for a number of processes.

W = processes, V = shards of a step. A strategy's companion `strategies/_NAME_forecast.py` has `forecast(setting) ->
Forecast`; it raises LaunchError or ModelError where the strategy cannot run like that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.core.distributed.bandwidth import Bandwidth
from lockstep.core.reduction.tree import Shards
from lockstep.parallel.measurements import Measurements, Seconds, Weight
from lockstep.parallel.memory_forecast import Memory, copied, saved

OVERLAP = 0.6
"""The backward pass's part of a micro-batch's time, in which an exchange can hide where a core, or a GPU, is free for
it: it does about twice the work of the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes and what they run on."""

    world: int
    per_machine: int
    """Processes of a machine."""
    slots: int
    """Processes that a machine can run at the same time: its cores over run.threads, or its GPUs."""
    links: Bandwidth | None
    """As measured on this machine; None for one process."""
    bandwidth: float | None
    """Bytes per second of the network, where it was stated; else what was measured over the loopback counts."""

    @property
    def machines(self) -> int:
        return -(-self.world // self.per_machine)

    @property
    def crowd(self) -> float:
        """How many times longer work takes that was measured with a core for each process."""
        return max(1.0, min(self.per_machine, self.world) / self.slots)

    def seconds(self, sent: float, path: str, *, messages: int = 0) -> float:
        """How long a process takes to send so many bytes; `path`: which of the links they take."""
        if not sent:
            return 0.0
        assert self.links is not None, "more than one process, but no links were measured"
        latency = messages * self.links.latency_seconds
        if self.bandwidth is not None:
            return sent / self.bandwidth + latency
        return (sent / getattr(self.links, path) + latency) * self.crowd

    def together(self, times: int) -> float:
        """Seconds for so many small collectives besides: the loss, the agreement whether to stop, a barrier."""
        if self.world == 1 or self.links is None:
            return 0.0
        return times * self.links.together_seconds * self.crowd


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A question to a strategy's file."""

    section: Any
    """The strategy's own settings."""
    shards: int
    """V, of a step."""
    is_exact: bool
    """Whether gradients are added in the shards' tree."""
    has_average: bool
    """Whether a moving average of the weights is kept."""
    facts: Measurements
    seconds: Seconds
    """As measured with as many processes at once as run on a machine, or as it can run."""
    cluster: Cluster

    @property
    def present(self) -> Shards:
        """The shards of a whole step."""
        return frozenset(range(self.shards))

    def between_steps(self, weights: Sequence[Weight], *, copies: int, share: float = 1.0) -> dict[str, int]:
        """The parts of a process's memory that stay: `weights` as it holds them, of which `copies` ranks hold the same;
        `share` of the buffers in a checkpoint is another's business."""
        facts = self.facts
        trained = facts.bytes_of(weights, is_trained=True)
        tensors = saved(facts, weights, average=self.has_average) | {"buffers": facts.buffer_bytes}
        return {
            "fixed": facts.fixed_bytes,
            "parameters": facts.bytes_of(weights) + facts.buffer_bytes,
            "optimizer": round(trained * facts.optimizer_ratio),
            "average": facts.bytes_of(weights) if self.has_average else 0,
            "checkpoint": copied(tensors, copies) if facts.device == "cpu" else 0,
        }

    def start_bytes(self, more: int = 0) -> int:
        """At its start every process has built the whole model, and `more`."""
        return self.facts.fixed_bytes + max(self.facts.build_bytes, self.facts.parameter_bytes + more)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step."""

    compute: float
    """Forward and backward passes."""
    fetch: float
    exchange: float
    """Waiting for tensors on their way, as far as it is not hidden behind the backward pass."""
    idle: float
    """A pipeline's bubble, as far as nobody else uses the core."""
    update: float
    rest: float = 0.0
    """What steps of the strategy's trial took beyond these parts; less than 0 where the parts were too much."""

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Of the process that needs most."""

    memory: Memory
    sent_bytes: int
    """Per step, over sockets or the network."""
    shared_bytes: int = 0
    """Per step, added up in memory that the processes of a machine share."""
    times: Times
    turns: int = 1
    """How often in a step there is what only a trial can tell: the strategy's own work."""
    bubble: float = 0.0
    """The part of a pipeline's steps that stages wait with a core for each, were they equally long."""
    notes: tuple[str, ...] = field(default=())
