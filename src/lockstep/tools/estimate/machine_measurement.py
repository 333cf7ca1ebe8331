"""Measures a config on this machine for an estimate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import torch
from pydantic import BaseModel

from lockstep.base import plugins
from lockstep.base.world import cores
from lockstep.core.host.memory_meter import available_bytes
from lockstep.parallel.forecast import Cluster, PartialSums, peak_of_passes, sequential_sums
from lockstep.parallel.measurements import Measurements, Seconds
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.trials import processes_text, strategy

T = TypeVar("T")
SECONDS = ("fetch", "passes", "update")
StepSeconds = dict[str, float]
"""Strategy -> seconds of a step."""


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    world_sizes: tuple[int, ...] = (1, 2, 4, 8)
    per_machine: int | None = None
    """Processes on a machine; None: all of them on this one, or as many as it has GPUs."""
    memory_bytes: int | None = None
    """Memory of a device; None: this machine's divided by its processes, or the GPU's."""
    bandwidth: float | None = None
    """Bytes per second of the network; None: as measured over the loopback."""
    seconds: float = 5.0
    """Time for which each measurement times steps."""


@dataclass(frozen=True, kw_only=True)
class MachineMeasurements:
    alone: Measurements
    crowded: Measurements | None
    """Measured with several processes at once: as many as requested, at most `slots`."""
    together: int
    """Number of those processes."""
    trials: dict[int, StepSeconds]
    """Number of processes -> seconds of a step with each strategy."""
    slots: int
    """Processes that this machine can run at the same time."""

    def seconds(self, processes: int) -> Seconds:
        """Interpolate the times with this many processes at once, linearly between one and those that were measured."""
        if self.crowded is None or self.together == 1:
            return self.alone.seconds
        weight = min(1.0, (processes - 1) / (self.together - 1))
        pairs = {name: (getattr(self.alone.seconds, name), getattr(self.crowded.seconds, name)) for name in SECONDS}
        return Seconds(**{name: one + weight * (more - one) for name, (one, more) in pairs.items()})

    def nearest_trial(self, cluster: Cluster) -> int:
        """Return the number of processes of the closest trials; more than one where the cluster has more than one."""
        local = min(cluster.per_machine, cluster.world)
        several = [each for each in self.trials if each > 1]
        if cluster.world == 1 or not several:
            return 1
        return max((each for each in several if each <= local), default=min(several))

    def cluster(self, world_size: int, *, per_machine: int, bandwidth: float | None = None) -> Cluster:
        """Return a cluster of machines like this one."""
        return Cluster(
            world=world_size,
            per_machine=per_machine,
            slots=self.slots,
            links=self.crowded.links if self.crowded else None,
            bandwidth=bandwidth,
        )


def per_machine(world_size: int, options: EstimateOptions, slots: int) -> int:
    return options.per_machine or (min(world_size, slots) if torch.cuda.is_available() else world_size)


def measure(recipe: Recipe, options: EstimateOptions, *, report: Callable[[str], None]) -> MachineMeasurements:
    """Measure one process alone, then several at once if any world size needs them; then time every strategy on the
    requested world sizes, as far as they run here."""
    slots = torch.cuda.device_count() if torch.cuda.is_available() else max(1, cores() // recipe.run.threads)
    together = min(max(per_machine(world_size, options, slots) for world_size in options.world_sizes), slots)
    if max(options.world_sizes) > 1 and not torch.cuda.is_available():
        together = max(2, together)
    with trials.temporary_folder("lockstep-estimate-") as outer:

        def run(processes: int, kind: type[T], strategies: Sequence[str] = ()) -> list[T]:
            """Measure in processes of their own -> the facts of each rank. Raises TrialFailed."""

            def say(part: str) -> None:
                report(f"{processes_text(processes)}: {part} ...")

            (folder := outer / f"{'tried' if strategies else 'measured'}-{processes}").mkdir()
            say("starting")
            varied = trials.varied(recipe, {"run": {"dir": folder, "name": "run"}}, parallel=strategy("ddp"))
            request = MeasurementRequest(seconds=options.seconds, strategies=tuple(strategies))
            trials.run(varied, folder, task="estimate", request=request, processes=processes, report=say).checked()
            return trials.results(folder, kind)

        alone = calibrated(medians(run(1, Measurements)))
        crowded = medians(run(together, Measurements)) if together > 1 else None
        tried, names = dict[int, StepSeconds](), plugins.names("parallel.strategies")
        for number in worth_trying(options, slots, together=together, facts=alone):
            ranks = run(number, StepSeconds, names)
            tried[number] = {name: median(each[name] for each in ranks) for name in ranks[0]}
    return MachineMeasurements(alone=alone, crowded=crowded, together=together, slots=slots, trials=tried)


def medians(ranks: Sequence[Measurements]) -> Measurements:
    """Return the memory of rank 0, and the medians of all times."""
    seconds = {name: median(getattr(facts.seconds, name) for facts in ranks) for name in SECONDS}
    return replace(ranks[0], seconds=Seconds(**seconds))


class MeasurementRequest(BaseModel):
    seconds: float
    """Minimum time for which steps are timed."""
    strategies: tuple[str, ...] = ()
    """Strategies to time together with the other processes; empty: each process measures by itself."""


def worth_trying(options: EstimateOptions, slots: int, *, together: int, facts: Measurements) -> list[int]:
    """Choose numbers of processes to time strategies on: those measured at once, and the requested ones on one machine;
    on a CPU up to twice its slots, if memory allows."""
    each = facts.fixed_bytes + 2 * facts.parameter_bytes + facts.optimizer_bytes + facts.step_bytes
    most = slots if torch.cuda.is_available() else min(2 * slots, available_bytes() // each)
    sizes = {per_machine(world_size, options, slots) for world_size in options.world_sizes if world_size > 1}
    several = {size for size in sizes | {together} if 1 < size <= max(most, together)}
    return sorted(several | ({1} & set(options.world_sizes)))


def calibrated(facts: Measurements) -> Measurements:
    """Return measurements with working memory, of kernels and malloc: what whole steps took beyond what is counted."""
    shards, blocks = frozenset(range(facts.step_shards)), range(len(facts.blocks))
    whole = sequential_sums(shards, shards)
    alone = PartialSums(before=(0,), after=(1,))
    missing = [
        measured - peak_of_passes(facts, facts.weights, blocks, sums=sums)
        for measured, sums in ((facts.step_bytes, whole), (facts.pass_bytes, alone))
    ]
    return replace(facts, working_bytes=max(0, *missing))
