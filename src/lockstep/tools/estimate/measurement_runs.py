"""Measurements in processes of their own, which end with the command."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from lockstep.base import storage
from lockstep.parallel.measurements import Measurements, Seconds
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.trials import TrialFailed, processes_text, strategy, varied

PARTS = "parts"
"""File with a line for each part of a measurement, written when the part starts."""

StepSeconds = dict[str, float]
"""Strategy -> seconds of a step."""


class MeasurementRequest(BaseModel):
    to: Path
    """Folder for its results."""
    seconds: float
    """Minimum time for which steps are timed."""
    strategies: tuple[str, ...] = ()
    """Strategies to time together with the other processes; empty: each process measures by itself."""


def begin_part(folder: Path, part: str) -> None:
    """Report to the calling command, from the process of rank 0, which part of a measurement begins."""
    with storage.append(folder / PARTS) as file:
        file.write(f"{part}\n")


@dataclass(frozen=True, kw_only=True)
class MeasurementRuns:
    """Measurements of one recipe, in a temporary folder."""

    recipe: Recipe
    folder: Path
    seconds: float
    """Time for which each process times steps."""
    report: Callable[[str], None]
    """Called with a line for each part of a measurement that begins."""

    def measured(self, processes: int) -> Measurements:
        """Measure several processes at once: memory of rank 0, and the medians of all times. Raises TrialFailed."""
        folder = self._run(f"measured-{processes}", processes)
        ranks = [Measurements.read(folder / f"facts-{rank}.json") for rank in range(processes)]
        times = [facts.seconds for facts in ranks]
        seconds = Seconds(
            **{name: median(getattr(each, name) for each in times) for name in ("fetch", "passes", "update")}
        )
        return replace(ranks[0], seconds=seconds)

    def timed(self, processes: int, strategies: Sequence[str]) -> StepSeconds:
        """Time a step with each strategy -> seconds, the median over all processes. Raises TrialFailed."""
        folder = self._run(f"tried-{processes}", processes, strategies)
        ranks = [json.loads((folder / f"trials-{rank}.json").read_text("utf-8")) for rank in range(processes)]
        return {name: median(each[name] for each in ranks) for name in ranks[0]}

    def _run(self, name: str, processes: int, strategies: Sequence[str] = ()) -> Path:
        """Run the processes to their end -> the folder with their results."""
        folder = self.folder / name
        folder.mkdir()
        parts = folder / PARTS
        self.report(f"{processes_text(processes)}: starting ...")
        seen: list[str] = []

        def poll() -> None:
            lines = parts.read_text(encoding="utf-8").split("\n") if parts.exists() else [""]
            del lines[-1]  # it may not be whole yet
            for part in lines[len(seen) :]:
                self.report(f"{processes_text(processes)}: {part} ...")
            seen[:] = lines

        recipe = varied(self.recipe, {"run": {"dir": folder, "name": "run"}}, parallel=strategy("ddp"))
        request = MeasurementRequest(to=folder, seconds=self.seconds, strategies=tuple(strategies))
        trial = trials.run(recipe, folder, task="estimate", request=request, processes=processes, poll=poll)
        if trial.code:
            raise TrialFailed(trial.output, trial.code)
        return folder
