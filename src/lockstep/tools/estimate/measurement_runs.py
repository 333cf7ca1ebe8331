"""Starts measurements in processes of their own, which end with the command, and reads what they found."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from lockstep.base import plugins
from lockstep.parallel.measurements import Measurements, Seconds
from lockstep.run.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.estimate.measurement_request import MeasurementRequest
from lockstep.tools.trials import TrialFailed, varied

Trials = dict[str, float]
"""Strategy -> seconds of a step that it was seen to take."""


@dataclass(frozen=True, kw_only=True)
class MeasurementRuns:
    """Measurements of one recipe, in a folder that goes away."""

    recipe: Recipe
    folder: Path
    seconds: float
    """How long each process times steps."""

    def measured(self, processes: int) -> Measurements:
        """The facts of so many processes at once: memory is the first one's, times are medians over all.

        Raises TrialFailed.
        """
        folder = self._run(f"measured-{processes}", processes)
        return combined([Measurements.read(folder / f"facts-{rank}.json") for rank in range(processes)])

    def tried(self, processes: int, strategies: Sequence[str]) -> Trials:
        """What steps take with each strategy, the median over all processes. Raises TrialFailed."""
        folder = self._run(f"tried-{processes}", processes, strategies)
        found = [json.loads((folder / f"trials-{rank}.json").read_text("utf-8")) for rank in range(processes)]
        return {name: median(each[name] for each in found) for name in found[0]}

    def _run(self, name: str, processes: int, strategies: Sequence[str] = ()) -> Path:
        """The folder in which the processes leave what they found."""
        folder = self.folder / name
        folder.mkdir()
        sections = {"run": {"dir": folder, "name": "run"}}
        recipe = varied(self.recipe, sections, parallel=plugins.find("parallel.strategies", "ddp").Config(kind="ddp"))
        request = MeasurementRequest(to=folder, seconds=self.seconds, strategies=tuple(strategies))
        done = trials.run(recipe, folder, task="estimate", request=request.model_dump_json(), processes=processes)
        if done.code:
            raise TrialFailed(trials.tail(done.output), done.code)
        return folder


def combined(found: list[Measurements]) -> Measurements:
    """What several processes have measured at once, as one."""
    times = [facts.seconds for facts in found]
    seconds = Seconds(**{name: median(getattr(each, name) for each in times) for name in ("fetch", "passes", "update")})
    return replace(found[0], seconds=seconds)
