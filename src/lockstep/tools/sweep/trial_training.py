"""Trains one trial of a sweep in processes of its own, follows it, and returns its result."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lockstep.base import config, storage
from lockstep.base.errors import ConfigError, Interrupted, LaunchError
from lockstep.base.lifetime import Started
from lockstep.base.user_code import MARK
from lockstep.checkpoint import retention
from lockstep.observe.report.goodput import starts
from lockstep.observe.run_folder import RunFolder, RunSummary
from lockstep.observe.watch.run_state import LAUNCH, RunReader, RunState
from lockstep.recipe import run_paths
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.compare.run_evidence import DECIDED
from lockstep.tools.sweep.sweep_state import Measured, SweepTrial

LOOK_SECONDS = 0.5
AFTERWORD = re.compile(
    r"rank [0-9]+ \(process [0-9]+\) (failed with an exception|ended with exit code)|The other processes were ended|"
    r"It is not started again|go on with|Go on from"
)
"""Lines that a launcher prints after the reason of a failure."""
Judge = Callable[[Sequence[Measured]], int | None]
"""Evaluations of a trial -> the index of the one that ends it early, None for none."""


@dataclass(kw_only=True)
class TrialTraining:
    trial: SweepTrial
    recipe: Recipe
    metric: str
    judge: Judge
    start: Callable[[Path], Started] | None = None
    """Start the processes of the run in this folder, whose output is appended to logs/output.log; None for a job."""
    output: Callable[[Path], Path] = lambda folder: folder / "logs" / trials.OUTPUT
    """The run's folder -> the file with its launcher's output."""
    total_steps: int = 0
    pruned_at: int | None = None
    """Index of the evaluation that ends it early."""

    @property
    def folder(self) -> Path:
        return self.recipe.folder

    def run(self, show: Callable[[RunState], None]) -> SweepTrial:
        """Train from where an earlier start was killed -> the trial as it ended.

        Raises Interrupted where the run was stopped, LaunchError where another process trains it.
        """
        code = 0 if self.is_decided else self._train(show)
        self.follow(RunReader(self.folder).state())
        if self.pruned_at is None and code == Interrupted.exit_code:
            raise Interrupted(f"{self.trial.name} was stopped")
        return self.ended(code)

    @property
    def is_decided(self) -> bool:
        """Whether the run has ended and does not go on."""
        return self._summary().status in DECIDED

    def ended(self, code: int) -> SweepTrial:
        """Return the trial as its run has ended, with an exit code."""
        if self.pruned_at is not None:
            return self._pruned_trial(self.pruned_at)
        return self._failed_trial(code) if code else self._finished_trial()

    def _train(self, show: Callable[[RunState], None]) -> int:
        assert self.start is not None
        grace = self.recipe.launch.grace_seconds + 2.0
        self._wait_for_earlier_start(grace)
        self.prepare_folder()
        reader, launcher, next_look = RunReader(self.folder), self.start(self.folder), 0.0

        def poll() -> None:
            nonlocal next_look
            if self.pruned_at is None and time.monotonic() >= next_look:
                state = reader.state()
                show(state)
                self.follow(state)
                next_look = time.monotonic() + LOOK_SECONDS
                if self.pruned_at is not None:
                    launcher.terminate()  # it saves first

        return trials.followed(launcher, poll, grace_seconds=grace)[0]

    def _wait_for_earlier_start(self, seconds: float) -> None:
        """Wait for the processes of a killed sweep, which save and end by themselves. Raises LaunchError."""
        if not self.folder.is_dir():
            return
        try:
            with FileLock(self.folder / ".lock", timeout=seconds):
                pass
        except Timeout:
            raise LaunchError(f"{self.folder} is still being trained by another process: wait, or stop that") from None

    def prepare_folder(self) -> None:
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            storage.write(self.folder / LAUNCH, config.dump(self.recipe))
            storage.write(self.folder / "logs" / trials.OUTPUT, "")
        except OSError as error:
            raise ConfigError(f"cannot write to {self.folder}: {error.strerror}") from None

    # ---- while it trains

    def follow(self, state: RunState) -> None:
        """Keep the evaluations, and find the first one that is clearly worse than those of earlier trials."""
        if self.pruned_at is None and state.start and state.evaluation:
            self.total_steps = state.start.lines[0].total_steps
            newest = state.evaluation.step
            if not self.trial.evaluations or self.trial.evaluations[-1].step != newest:
                self.trial.evaluations = [
                    Measured(step=line.step, value=line.values.get(self.metric), loss=line.values.get("loss"))
                    for line in RunFolder(self.folder).metric_lines()
                    if line.kind == "evaluation"
                ]
                early = [each for each in self.trial.evaluations if each.step < self.total_steps]
                self.pruned_at = self.judge(early)

    # ---- after its end

    def _finished_trial(self) -> SweepTrial:
        summary = self._summary()
        values = self._checkpoint_metrics() or summary.evaluation
        value = values.get(self.metric)
        if value is None or value != value:
            what = "is not finite" if self.metric in values else f"was not measured (there is: {', '.join(values)})"
            return self._result("failed", note=f"{self.metric} {what}")
        return self._result("finished", value=value, loss=values.get("loss"), digest=summary.digest)

    def _checkpoint_metrics(self) -> dict[str, Any]:
        """Return the evaluation of the checkpoint that `lockstep evaluate` and `export` take."""
        recipe, checkpoints, _ = run_paths.locate(self.folder)  # whose checkpoint.mode is decided
        manifests = retention.manifests(checkpoints)
        chosen = retention.best(manifests, recipe.checkpoint) or next(iter(manifests), None)
        return dict(manifests[chosen].metrics) if chosen else {}

    def _pruned_trial(self, index: int) -> SweepTrial:
        self.trial.evaluations = self.trial.evaluations[: index + 1]
        last = self.trial.evaluations[index]
        note = f"at step {last.step:,} of {self.total_steps:,}, worse than the median"
        return self._result("pruned", value=last.value, loss=last.loss, note=note)

    def _failed_trial(self, code: int) -> SweepTrial:
        file = self.output(self.folder)
        lines = [line.removeprefix(MARK) for line in storage.tail(file).splitlines()]
        reasons = [line for line in lines if line[:1].strip() and not AFTERWORD.match(line)]  # advice is indented
        return self._result("failed", note=reasons[-1] if reasons else f"exit code {code}")

    def _result(self, state: str, **results: Any) -> SweepTrial:
        history = RunFolder(self.folder).history()
        seconds = sum(start.ended - start.began for start in starts(history))
        return self.trial.model_copy(update={"state": state, "seconds": round(seconds, 1), **results})

    def _summary(self) -> RunSummary:
        return RunFolder(self.folder).summary()
