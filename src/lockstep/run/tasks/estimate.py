"""Measurements for `lockstep estimate`: each process alone, or strategies on all of them.

In fresh processes, since what a process did before changes how fast it gets memory.
"""

import sys
from dataclasses import replace
from typing import Any

from lockstep.base import plugins
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.distributed.bandwidth import bandwidth
from lockstep.core.distributed.collectives import reported_once
from lockstep.core.numerics.precision import fix_numerics
from lockstep.parallel.measurements import Measurements
from lockstep.run.tasks._task import Task
from lockstep.tools import trials
from lockstep.tools.estimate.machine_measurement import MeasurementRequest
from lockstep.tools.estimate.process_measurement import Measurement, timed_strategies

NEEDS_GROUP = False


class EstimateTask(Task):
    """Writes Measurements, or seconds by strategy if the request names strategies."""

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Measure; nothing is resumed."""
        recipe, request = self.recipe, self.asked(MeasurementRequest)
        exact, precision = recipe.run.reproducibility == "exact", recipe.train.precision
        fix_numerics(threads=recipe.run.threads, exact=exact, precision=precision)
        if request.strategies:
            names, seconds = list(request.strategies), request.seconds
            with process_group.opened(self.world, self.device), reported_once(sys.stderr):
                result: Any = timed_strategies(
                    recipe, names, world=self.world, device=self.device, seconds=seconds, report=self.report
                )
        else:
            result = self.measurements(request.seconds)
        trials.write_result(self.request_file.parent, self.world.rank, result)

    def measurements(self, seconds: float) -> Measurements:
        """Measure the bandwidth between all processes, then every process by itself, at the same time."""
        for sink in self.recipe.observe.sinks:  # their imports are part of a process's memory
            plugins.find("observe.sinks", sink)
        links = None
        if self.world.size > 1:
            with process_group.opened(self.world, self.device):
                self.report("what they send each other")
                links = bandwidth(self.device)
        with process_group.opened(World(), self.device), reported_once(sys.stderr):
            measurement = Measurement(recipe=self.recipe, device=self.device, seconds=seconds, report=self.report)
            facts = measurement.facts()
        return replace(facts, links=links)

    def report(self, part: str) -> None:
        """Announce, once for all processes, what is measured next."""
        if self.world.rank == 0:
            trials.announce(self.request_file.parent, part)


build = EstimateTask
