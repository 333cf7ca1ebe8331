"""Starts measurements in processes of their own, which end with the command, and reads what they found."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from lockstep.base import config, plugins, storage
from lockstep.base.errors import LockstepError
from lockstep.core.host.lifetime import end_family
from lockstep.run.recipe import Recipe
from lockstep.tools.estimate.measurements import Measurements, Seconds

GRACE_SECONDS = 5
TAIL_LINES = 40
Trials = dict[str, float]
"""Strategy -> seconds of a step that it was seen to take."""


class MeasurementFailed(LockstepError):
    """A measuring process ended with an error of its own, which is repeated; so is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code == 2 else 1


@dataclass(frozen=True, kw_only=True)
class MeasurementRuns:
    """Measurements of one recipe, in a folder that goes away."""

    recipe: Recipe
    folder: Path
    seconds: float
    """How long each process times steps."""

    def measured(self, processes: int) -> Measurements:
        """The facts of so many processes at once: memory is the first one's, times are medians over all.

        Raises MeasurementFailed.
        """
        folder = self._run(f"measured-{processes}", processes)
        return together([Measurements.read(folder / f"facts-{rank}.json") for rank in range(processes)])

    def tried(self, processes: int, strategies: Sequence[str]) -> Trials:
        """What steps take with each strategy, the median over all processes. Raises MeasurementFailed."""
        folder = self._run(f"tried-{processes}", processes, strategies)
        found = [json.loads((folder / f"trials-{rank}.json").read_text("utf-8")) for rank in range(processes)]
        return {name: median(each[name] for each in found) for name in found[0]}

    def _run(self, name: str, processes: int, strategies: Sequence[str] = ()) -> Path:
        """The folder in which the processes leave what they found."""
        folder = self.folder / name
        folder.mkdir()
        path = folder / "config.yaml"
        storage.write(path, config.dump(varied(self.recipe, folder, processes)))
        command = [sys.executable, "-P", "-m", "lockstep.tools.estimate.measurement_launcher"]
        command += [str(processes), str(folder), str(self.seconds), str(path), " ".join(strategies)]
        with (folder / "output.log").open("w", encoding="utf-8") as log:
            launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                launcher.wait()
            finally:
                end_family(launcher, grace_seconds=GRACE_SECONDS + 2)
        if launcher.returncode:
            lines = (folder / "output.log").read_text(encoding="utf-8", errors="replace").splitlines()
            raise MeasurementFailed("\n".join(lines[-TAIL_LINES:]), launcher.returncode)
        return folder


def together(found: list[Measurements]) -> Measurements:
    """What several processes have measured at once, as one."""
    times = [facts.seconds for facts in found]
    seconds = Seconds(**{name: median(getattr(each, name) for each in times) for name in ("fetch", "passes", "update")})
    return replace(found[0], seconds=seconds)


def varied(recipe: Recipe, folder: Path, processes: int) -> Recipe:
    """The user's recipe for processes of this machine that save and tell nothing."""
    local = plugins.find("launch.launchers", "local").Config(
        kind="local", processes=processes, grace_seconds=GRACE_SECONDS, max_restarts=0
    )
    alone = plugins.find("parallel.strategies", "ddp").Config(kind="ddp")
    run = recipe.run.model_copy(update={"dir": folder, "name": "run"})
    return recipe.model_copy(update={"run": run, "launch": local, "parallel": alone})
