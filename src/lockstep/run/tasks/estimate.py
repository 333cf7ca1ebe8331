"""Measuring for `lockstep estimate`: alone or at the same time as others; or trying strategies together with others, in
fresh processes, since what was done before changes how fast a process gets memory."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from lockstep.base import plugins, storage
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.distributed.bandwidth import bandwidth
from lockstep.core.distributed.collectives import reported_once
from lockstep.core.host.signals import SignalWatch
from lockstep.core.numerics.precision import fix_numerics
from lockstep.parallel.measurements import Measurements
from lockstep.run.recipe import Recipe
from lockstep.tools.estimate.measurement_runs import MeasurementRequest
from lockstep.tools.estimate.process_measurement import Measurement
from lockstep.tools.estimate.strategy_timing import timed_strategies

NEEDS_GROUP = False


class EstimateTask:
    """Writes facts-RANK.json, or trials-RANK.json where strategies are named."""

    def __init__(self, request: MeasurementRequest, recipe: Recipe, world: World) -> None:
        self.request, self.recipe, self.world = request, recipe, world
        self.device = process_group.device_of(world)

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Measure; there is nothing to resume."""
        recipe, to, rank = self.recipe, self.request.to, self.world.rank
        fix_numerics(threads=recipe.run.threads, exact=recipe.run.reproducibility == "exact")
        if self.request.strategies:
            storage.write(to / f"trials-{rank}.json", json.dumps(self.tried()))
        else:
            self.measured().write(to / f"facts-{rank}.json")

    def tried(self) -> dict[str, float]:
        """Seconds of a step with each strategy."""
        names, seconds = list(self.request.strategies), self.request.seconds
        with process_group.opened(self.world, self.device), reported_once(sys.stderr):
            return timed_strategies(self.recipe, names, world=self.world, device=self.device, seconds=seconds)

    def measured(self) -> Measurements:
        """Bandwidth first, all together; then each process for itself, at the same time."""
        for sink in self.recipe.observe.sinks:  # part of what a process holds
            plugins.find("observe.sinks", sink)
        found = None
        if self.world.size > 1:
            with process_group.opened(self.world, self.device):
                found = bandwidth(self.device)
        with process_group.opened(World(), self.device), reported_once(sys.stderr):
            facts = Measurement(recipe=self.recipe, device=self.device, seconds=self.request.seconds).facts()
        return replace(facts, links=found)

    def watching(self) -> AbstractContextManager[object]:
        """Nobody waits for another for long."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is kept open."""


def build(
    recipe: Recipe, world: World, signals: SignalWatch, *, request: Path | None = None, began: float = 0.0
) -> EstimateTask:
    """The task that a file asks for."""
    assert request is not None
    return EstimateTask(MeasurementRequest.model_validate_json(request.read_bytes()), recipe, world)
