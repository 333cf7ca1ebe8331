"""Everything that this machine can measure of a config, and what is asked about it."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from lockstep.base import plugins
from lockstep.base.world import cores
from lockstep.parallel.forecast import Cluster
from lockstep.parallel.measurements import Measurements, Seconds
from lockstep.parallel.memory_forecast import PartialSums, peak_of_passes, sequential_sums
from lockstep.run.recipe import Recipe
from lockstep.tools.estimate.measurement_runs import MeasurementRuns, Trials

SECONDS = ("fetch", "passes", "update")


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    worlds: tuple[int, ...] = (1, 2, 4, 8)
    per_machine: int | None = None
    """Processes of a machine; None: all of them are on this one, or as many as it has GPUs."""
    memory_bytes: int | None = None
    """Of a device; None: this machine's over the processes on it, or the GPU's."""
    bandwidth: float | None = None
    """Bytes per second of the network; None: as measured over the loopback."""
    seconds: float = 5.0
    """How long steps are timed, for each measurement."""


@dataclass(frozen=True, kw_only=True)
class MachineMeasurements:
    alone: Measurements
    crowded: Measurements | None
    """Measured with as many processes at once as are asked for, or as can run at the same time."""
    together: int
    """How many that were."""
    trials: dict[int, Trials]
    """Number of processes -> what steps took with them: see trials.py."""
    slots: int

    def seconds(self, processes: int) -> Seconds:
        """Times with so many processes at once; between one and those that were measured, on a line."""
        if self.crowded is None or self.together == 1:
            return self.alone.seconds
        part = min(1.0, (processes - 1) / (self.together - 1))
        pairs = {name: (getattr(self.alone.seconds, name), getattr(self.crowded.seconds, name)) for name in SECONDS}
        return Seconds(**{name: one + part * (more - one) for name, (one, more) in pairs.items()})

    def tried(self, cluster: Cluster) -> int:
        """The number of processes of the trials that come closest: where several are asked for, several."""
        local = min(cluster.per_machine, cluster.world)
        several = [each for each in self.trials if each > 1]
        if cluster.world == 1 or not several:
            return 1
        return max((each for each in several if each <= local), default=min(several))

    def cluster(self, world: int, *, per_machine: int, bandwidth: float | None = None) -> Cluster:
        """Processes on machines like this one."""
        return Cluster(
            world=world,
            per_machine=per_machine,
            slots=self.slots,
            links=self.crowded.links if self.crowded else None,
            bandwidth=bandwidth,
        )


def slots_of(recipe: Recipe) -> int:
    """Processes that this machine can run at the same time."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, cores() // recipe.run.threads)


def per_machine(world: int, wish: EstimateOptions, slots: int) -> int:
    return wish.per_machine or (min(world, slots) if torch.cuda.is_available() else world)


def measure(recipe: Recipe, wish: EstimateOptions, *, say: Callable[[str], object]) -> MachineMeasurements:
    """One process alone; then, if several are asked for, as many as they are or as this machine runs at once. Then
    every strategy is tried on the numbers of processes that are asked for, as far as they run here."""
    slots = slots_of(recipe)
    together = min(max(per_machine(world, wish, slots) for world in wish.worlds), slots)
    if max(wish.worlds) > 1 and not torch.cuda.is_available():
        together = max(2, together)
    with tempfile.TemporaryDirectory(prefix="lockstep-estimate-", ignore_cleanup_errors=True) as folder:
        runs, crowded = MeasurementRuns(recipe=recipe, folder=Path(folder), seconds=wish.seconds), None
        say("measuring one process ...")
        alone = calibrated(runs.measured(1))
        if together > 1:
            say(f"measuring {together} processes at once, and what they send each other ...")
            crowded = runs.measured(together)
        trials: dict[int, Trials] = {}
        for processes in worth_trying(wish, slots, together=together, facts=alone):
            say(f"trying every strategy on {processes} process{'es' if processes > 1 else ''} ...")
            trials[processes] = runs.tried(processes, plugins.names("parallel.strategies"))
    return MachineMeasurements(alone=alone, crowded=crowded, together=together, slots=slots, trials=trials)


def worth_trying(wish: EstimateOptions, slots: int, *, together: int, facts: Measurements) -> list[int]:
    """Numbers of processes: as many as were measured at once, and those that are asked for on one machine; on a CPU, up
    to twice as many as it has cores for, if memory allows."""
    each = facts.fixed_bytes + 2 * facts.parameter_bytes + facts.optimizer_bytes + facts.step_bytes
    most = slots if torch.cuda.is_available() else min(2 * slots, psutil.virtual_memory().available // each)
    asked = {per_machine(world, wish, slots) for world in wish.worlds if world > 1} | {together}
    several = {number for number in asked if 1 < number <= max(most, together)}
    return sorted(several | ({1} & set(wish.worlds)))


def calibrated(facts: Measurements) -> Measurements:
    """With what whole steps took more than the parts that can be counted, as working memory: kernels' own, and what the
    C library keeps of memory that was freed."""
    shards, blocks = frozenset(range(facts.step_shards)), range(len(facts.blocks))
    whole = sequential_sums(shards, shards)
    alone = PartialSums(before=(0,), after=(1,))
    missing = [
        measured - peak_of_passes(facts, facts.weights, blocks, sums=sums)
        for measured, sums in ((facts.step_bytes, whole), (facts.pass_bytes, alone))
    ]
    return replace(facts, working_bytes=max(0, *missing))
