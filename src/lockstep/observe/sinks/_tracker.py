"""Base of sinks for experiment trackers: one tracker run for a run, over kills and resumes, without repeats.

The tracker's id of the run, and the last step that it was given, are in the run's folder. Steps that a resume repeats
have the same values, so they are not sent again; what a kill has kept from the tracker is sent from metrics.jsonl and,
for the time of the ranks, from history.jsonl, which has it in hundredths of a millisecond.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic_core

from lockstep.base import plugins, storage
from lockstep.base.errors import ConfigError, MissingExtra
from lockstep.base.events import Evaluated, RankTimes, RunEnded, RunStarted, StepDone
from lockstep.core.host import gpu_meter
from lockstep.core.host.phases import OF_STEPS
from lockstep.observe.run_folder import HIDDEN, METRICS, RECIPE, SUMMARY, RunFolder, flattened

NOTHING = (-1, 0)
ARTIFACTS = (RECIPE, SUMMARY, METRICS)


class Tracker(ABC):
    """Sends config, values, digest and files of a run to a tracker; an error leaves it out, and the run goes on."""

    name: str

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where the tracker's package, an extra of its name, is not installed."""
        try:
            plugins.require(self.name, self.name, what=self.name)
        except MissingExtra:
            how = f"pip install 'lockstep-train[{self.name}]'"
            raise ConfigError(f"observe.sinks names {self.name}, which is not installed: {how}") from None
        self.folder = folder
        self.record = folder / f"{self.name}.jsonl"
        """File with the id of the tracker's run, then a line [step, part] for all that was sent."""
        self.id, self.sent = "", NOTHING
        self.is_open = False

    def notice(self, event: object) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif not self.is_open:
            return
        elif isinstance(event, StepDone) and event.values:
            self._send(event.step, 0, {f"train/{name}": value for name, value in event.values.items()})
        elif isinstance(event, Evaluated):
            self._send(event.step, 1, {f"test/{name}": value for name, value in event.values.items()})
        elif isinstance(event, RankTimes):
            self._send(event.step, 2, of_ranks(event.seconds, event.steps, event.gpus))
        elif isinstance(event, RunEnded):
            self.is_open = False
            has_hidden = HIDDEN in dict(flattened(RunFolder(self.folder).known_settings())).values()
            names = [name for name in ARTIFACTS if name != RECIPE or not has_hidden]
            files = [self.folder / name for name in names if (self.folder / name).is_file()]
            self.end(event.status, event.summary, files)

    def _start(self, event: RunStarted) -> None:
        """Open the tracker's run, that of an earlier start unless this one starts at step 0."""
        known, self.sent = self._known() if event.resumed_step else ("", NOTHING)
        self.id = known
        self.id = self.open(event, RunFolder(self.folder).known_settings())
        if self.id != known:
            storage.write(self.record, json.dumps(self.id) + "\n")
        self.is_open = True
        self.sent = self.delivered()
        self._repeat(event.resumed_step)

    def _repeat(self, resumed_step: int) -> None:
        """Send what a kill has kept from the tracker."""
        found: dict[tuple[int, int], dict[str, float]] = {}
        for line in RunFolder(self.folder).metric_lines():
            part, group = (1, "test") if line.kind == "evaluation" else (0, "train")
            found[line.step, part] = {f"{group}/{name}": v for name, v in line.values.items() if v is not None}
        for each in RunFolder(self.folder).history_lines():
            if each.kind == "ranks" and each.steps and all(each.phases.get(name) for name in OF_STEPS):
                found[each.step, 2] = of_ranks(each.phases, each.steps, each.gpus)
        for (step, part), values in sorted(found.items()):
            if step <= resumed_step:
                self._send(step, part, values)

    def _known(self) -> tuple[str, tuple[int, int]]:
        """Read the id of the tracker's run, and the last (step, part) sent; a line cut short does not count."""
        try:
            first, *lines, _ = storage.read_regular(self.record, storage.MOST_JSON_BYTES).split(b"\n")
            step, part = pydantic_core.from_json(lines[-1]) if lines else NOTHING
            return str(pydantic_core.from_json(first)), (int(step), int(part))
        except (OSError, ValueError, TypeError, OverflowError):
            return "", NOTHING

    def _send(self, step: int, part: int, values: Mapping[str, float]) -> None:
        """Send values unless they were sent before a resume. The parts of a step come in their order."""
        if (step, part) > self.sent:
            self.log(step, values)
            self.sent = step, part
            with storage.append(self.record) as file:
                file.write(f"[{step}, {part}]\n")

    def close(self) -> None:
        """Release what the tracker holds; without RunEnded the run has failed."""
        if self.is_open:
            self.end("failed", {}, [])
            self.is_open = False

    @abstractmethod
    def open(self, event: RunStarted, config: Mapping[str, Any]) -> str:
        """Begin the tracker's run, or go on with that of self.id if it is not empty -> its id."""

    def delivered(self) -> tuple[int, int]:
        """Return the last (step, part) that the tracker has for certain; older ones are not sent again."""
        return self.sent

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send values of a step; steps only rise."""

    @abstractmethod
    def end(self, status: str, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Send how the run ended, and its files; then close."""


def of_ranks(
    seconds: Mapping[str, Sequence[float]], steps: int, gpus: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the milliseconds of a step by phase, of the rank with the most; figures of the GPUs."""
    times = {f"time/{name}": 1000 * max(seconds[name]) / steps for name in OF_STEPS}
    return times | {f"gpu/{name}": value for name, value in gpu_meter.scalars(gpus).items()}


def final_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the summary that a tracker shows beside the run."""
    names = ("digest", "chain", "steps", "epochs", "train_samples_per_second")
    facts = {name: summary[name] for name in names if summary.get(name) is not None}
    return facts | {f"evaluation/{name}": value for name, value in (summary.get("evaluation") or {}).items()}
