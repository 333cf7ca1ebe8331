"""The runs of a proof: real ones, each in processes of its own, in a folder that goes away."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from lockstep.base import plugins
from lockstep.base.errors import UserError
from lockstep.checkpoint.layout import listed, step_of
from lockstep.parallel.strategy_config import StrategySection
from lockstep.run.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.prove.proof_request import REFUSED, ProofRequest
from lockstep.tools.trials import TrialFailed


@dataclass(frozen=True, kw_only=True)
class ProofRun:
    folder: Path
    output: str
    """What its launcher and rank 0 wrote."""
    peak_bytes: int
    """The most memory that its processes held together."""

    @property
    def digest(self) -> str:
        return str(self.summary["digest"])

    @property
    def summary(self) -> dict[str, Any]:
        return self.read("summary.json")

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @property
    def noticed(self) -> str | None:
        """What its own look at the user's code has found that may change weights, if anything."""
        found = [each["what"] for each in self.summary["findings"] or () if each["leaves_promise"]]
        return found[0] if found else None

    @property
    def refusal(self) -> str | None:
        """Why it was not to be, in one line, where a person can mend it, or its strategy cannot take the model."""
        return " ".join(self.read(REFUSED)["reason"].split()) if (self.folder / REFUSED).is_file() else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without what the clock has a part in."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "samples_per_second"} for line in lines]


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A run whose last rank was killed in the middle of a step."""

    process: int
    steps: int
    """Steps done before."""
    checkpoint: int
    """Steps of the newest checkpoint that was left."""


@dataclass(kw_only=True)
class ProofRuns:
    """Starts runs of one recipe, on part of its data, and ends whatever it has started."""

    recipe: Recipe
    folder: Path
    steps: int
    task: ProofRequest
    on_cpu: bool
    say: Callable[[str], None]

    def run(self, name: str, processes: int, task: ProofRequest | None = None, **changes: Any) -> ProofRun:
        """Run to the end; `changes` are settings by section. Raises TrialFailed."""
        start = RunVariant(name=name, processes=processes, task=task or self.task, changes=changes)
        code, run = self.ended(start)
        if code:
            raise self._failure(start, run, code)
        return run

    def spread(self, name: str, processes: int, parallel: StrategySection) -> ProofRun | str:
        """Run to the end with another strategy -> the run, or why the strategy refuses it. Raises TrialFailed."""
        start = RunVariant(name=name, processes=processes, task=self.task, changes={}, parallel=parallel)
        code, run = self.ended(start)
        if code and (code != UserError.exit_code or run.refusal is None):
            raise self._failure(start, run, code)
        return run.refusal if code and run.refusal else run

    def kill(self, name: str, processes: int, *, every: int) -> Killed:
        """Run with a checkpoint every so many steps, and kill the last rank in mid-step, two after the first, once that
        checkpoint is there: it is written beside the steps.

        Raises TrialFailed, also when the run ends in any other way than by the kill.
        """
        note, checkpoints = self.folder / name / "paused.json", self.folder / name / "checkpoints"
        task, changes = replace(self.task, pause_after=every + 1), {"checkpoint": {"every_steps": every}}
        start = RunVariant(name=name, processes=processes, task=task, changes=changes)
        pids: list[int] = []

        def look() -> None:
            if not pids and note.is_file() and listed(checkpoints):
                pids.append(json.loads(note.read_text(encoding="utf-8"))["process"])
                with suppress(psutil.Error):
                    psutil.Process(pids[0]).kill()

        code, run = self.ended(start, look)
        left = listed(checkpoints)
        if not pids or not code or not left:
            raise self._failure(start, run, code)
        return Killed(process=pids[0], steps=every + 1, checkpoint=step_of(left[0]))

    def _failure(self, start: "RunVariant", run: ProofRun, code: int) -> TrialFailed:
        words = f"the proof's {start} ended with exit code {code}; its last words are above"
        return TrialFailed(f"{trials.tail(run.output)}\n{words}", code)

    def prepared(self, start: "RunVariant") -> tuple[Path, Recipe]:
        """Say what is to be run, and make its folder -> that, and the recipe."""
        folder = self.folder / start.name
        folder.mkdir(parents=True, exist_ok=True)
        self.say(f"{start} ...")
        return folder, varied(self.recipe, folder, start=start, steps=self.steps)

    def ended(self, start: "RunVariant", look: Callable[[], None] = lambda: None) -> tuple[int, ProofRun]:
        """Start a run and wait for its end -> exit code, run; `look` is called now and then meanwhile."""
        folder, recipe = self.prepared(start)
        done = trials.run(
            recipe,
            folder,
            task="proof",
            request=start.task.dump(),
            processes=start.processes,
            on_cpu=self.on_cpu,
            look=look,
        )
        return done.code, ProofRun(folder=folder, output=done.output, peak_bytes=done.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class RunVariant:
    name: str
    """Its folder; a name that is there is resumed."""
    processes: int
    task: ProofRequest
    changes: Mapping[str, Mapping[str, Any]]
    """Settings by section and name that differ from the proof's other runs."""
    parallel: StrategySection | None = None
    """Another strategy than the recipe's."""

    def __str__(self) -> str:
        return f"run {self.name} on {self.processes} process{'es' if self.processes > 1 else ''}"


def varied(recipe: Recipe, folder: Path, *, start: RunVariant, steps: int) -> Recipe:
    """The user's recipe, with few steps and without all that looks, saves or tells while it runs."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": folder.parent, "name": folder.name},
        "train": {"steps": steps, "epochs": None, "stop_metric": None},
        "schedule": {"warmup": recipe.schedule.warmup if recipe.schedule.warmup < 1 else 0.5},
        "evaluate": {"every_epochs": None, "every_steps": None},
        "checkpoint": {"every_steps": None, "every_minutes": None, "keep": 1, "best": None},
        "observe": {"sinks": ("jsonl",), "log_every": 1, "file": None},
    }
    for name, values in start.changes.items():
        sections.setdefault(name, {}).update(values)
    parallel = start.parallel or recipe.parallel
    if start.task.inspect:
        parallel = plugins.find("parallel.strategies", "single").Config(kind="single")
    elif start.processes > (parallel.MOST_PROCESSES or start.processes) or start.task.is_traced:  # of whole weights
        parallel = plugins.find("parallel.strategies", "ddp").Config(kind="ddp", find_unused=True)
    return trials.varied(recipe, sections, parallel=parallel.fitted(start.processes))
