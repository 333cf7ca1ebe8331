"""Trains one trial of a sweep, in processes of this machine or as a scheduler's job, and returns its result."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.base import config, storage
from lockstep.base.errors import ConfigError, Interrupted, LaunchError
from lockstep.base.user_code import MARK
from lockstep.checkpoint import retention
from lockstep.checkpoint.metric_modes import is_better
from lockstep.launch import launch_run, run_control
from lockstep.observe.report.goodput import starts
from lockstep.observe.run_folder import RunFolder
from lockstep.observe.watch.run_state import LAUNCH, RunReader, RunState
from lockstep.recipe import run_paths
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.sweep.sweep_state import Measured, Sweep, SweepTrial

LOOK_SECONDS = 0.5
AFTERWORD = re.compile(
    r"rank [0-9]+ \(process [0-9]+\) (failed with an exception|ended with exit code)|The other processes were ended|"
    r"It is not started again|go on with|Go on from"
)
"""Lines that a launcher prints after the reason of a failure."""
MOST_FAILURES = 150
"""Number of times in a row that a scheduler may not answer: for 5 minutes and more."""
LEAST_TRIALS = 3
"""Number of earlier trials that must have reached an evaluation before a trial is pruned by it."""


def clearly_worse(sweep: Sweep, evaluations: Sequence[Measured]) -> int | None:
    """Return the index of the first evaluation that is worse than the median of earlier trials' same one; None for
    none. A pure function of a trial's evaluations and of earlier trials.

    The same one is that of the same number: with another batch it comes after another step.
    """
    for index, own in enumerate(evaluations):
        reached = [t.evaluations[index].value for t in sweep.ended if len(t.evaluations) > index]
        values = [value for value in reached if value is not None]
        if len(values) >= LEAST_TRIALS and is_better(sweep.metric, median(values), own.value, mode=sweep.mode):
            return index
    return None


@dataclass(kw_only=True)
class TrialTraining:
    trial: SweepTrial
    recipe: Recipe
    trust: Sequence[str]
    sweep: Sweep
    total_steps: int = 0
    pruned_at: int | None = None
    """Index of the evaluation that ends it early."""

    @property
    def folder(self) -> Path:
        return self.recipe.folder

    @property
    def is_decided(self) -> bool:
        """Whether the run has ended and does not go on."""
        return run_control.has_finished(self.folder)

    def prepare_folder(self) -> None:
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            storage.write(self.folder / LAUNCH, config.dump(self.recipe))
            storage.write(self.folder / "logs" / trials.OUTPUT, "")
        except OSError as error:
            raise ConfigError(f"cannot write to {self.folder}: {error.strerror}") from None

    def follow(self, state: RunState) -> None:
        """Keep the evaluations, and find the first one that is clearly worse than those of earlier trials."""
        if self.pruned_at is None and state.start and state.evaluation:
            self.total_steps = state.start.lines[0].total_steps
            newest = state.evaluation.step
            if not self.trial.evaluations or self.trial.evaluations[-1].step != newest:
                self.trial.evaluations = [
                    Measured(step=line.step, value=line.values.get(self.sweep.metric), loss=line.values.get("loss"))
                    for line in RunFolder(self.folder).metric_lines()
                    if line.kind == "evaluation"
                ]
                early = [each for each in self.trial.evaluations if each.step < self.total_steps]
                self.pruned_at = self._first_worse(early)

    def _first_worse(self, evaluations: Sequence[Measured]) -> int | None:
        if self.sweep.prune == "none":
            return None
        if self.sweep.search != "optuna":
            return clearly_worse(self.sweep, evaluations)
        from lockstep.tools.sweep import optuna_search  # noqa: PLC0415 (an extra)

        return optuna_search.clearly_worse(self.sweep, evaluations)

    def output(self) -> Path:
        """Return the file with what its launcher wrote."""
        return self.folder / "logs" / trials.OUTPUT

    def ended(self, code: int) -> SweepTrial:
        """Return the trial as its run has ended, with an exit code."""
        if self.pruned_at is not None:
            self.trial.evaluations = self.trial.evaluations[: self.pruned_at + 1]
            last = self.trial.evaluations[-1]
            note = f"at step {last.step:,} of {self.total_steps:,}, worse than the median"
            return self._result("pruned", value=last.value, loss=last.loss, note=note)
        if code:
            lines = [line.removeprefix(MARK) for line in storage.tail(self.output()).splitlines()]
            reasons = [line for line in lines if line[:1].strip() and not AFTERWORD.match(line)]  # advice is indented
            return self._result("failed", note=reasons[-1] if reasons else f"exit code {code}")
        summary = RunFolder(self.folder).summary()
        values = self._checkpoint_metrics() or summary.evaluation
        value, metric = values.get(self.sweep.metric), self.sweep.metric
        if value is None or value != value:
            what = "is not finite" if metric in values else f"was not measured (there is: {', '.join(values)})"
            return self._result("failed", note=f"{metric} {what}")
        return self._result("finished", value=value, loss=values.get("loss"), digest=summary.digest)

    def _checkpoint_metrics(self) -> dict[str, Any]:
        """Return the evaluation of the checkpoint that `lockstep evaluate` and `export` take."""
        recipe, checkpoints, _ = run_paths.locate(self.folder)  # whose checkpoint.mode is decided
        manifests = retention.manifests(checkpoints)
        chosen = retention.best(manifests, recipe.checkpoint) or next(iter(manifests), None)
        return dict(manifests[chosen].metrics) if chosen else {}

    def _result(self, state: str, **results: Any) -> SweepTrial:
        history = RunFolder(self.folder).history()
        seconds = sum(start.ended - start.began for start in starts(history))
        return self.trial.model_copy(update={"state": state, "seconds": round(seconds, 1), **results})


class LocalTraining(TrialTraining):
    """A trial in processes of this machine."""

    def run(self, show: Callable[[RunState], None]) -> SweepTrial:
        """Train from where an earlier start was killed -> the trial as it ended. Raises Interrupted where the run was
        stopped, LaunchError where another process trains it."""
        code = 0 if self.is_decided else self._train(show)
        self.follow(RunReader(self.folder).state())
        if self.pruned_at is None and code == Interrupted.exit_code:
            raise Interrupted(f"{self.trial.name} was stopped")
        return self.ended(code)

    def _train(self, show: Callable[[RunState], None]) -> int:
        grace = self.recipe.launch.grace_seconds + 2.0
        if self.folder.is_dir():  # the processes of a killed sweep save, and end by themselves
            held = f"{self.folder} is still being trained by another process: wait, or stop that"
            with launch_run.locked(self.folder, held, seconds=grace):
                pass
        self.prepare_folder()
        arguments = (str(self.folder / LAUNCH), "0", "--resume", "auto", *self.trust)
        reader, launcher, next_look = RunReader(self.folder), trials.start(arguments, self.output()), 0.0

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


@dataclass(kw_only=True)
class TrialJob(TrialTraining):
    """A trial that a scheduler runs, as its own job, which goes on when the sweep is ended."""

    failures: int = 0
    """Times in a row that the scheduler has not answered."""
    is_cancelled: bool = False

    def output(self) -> Path:
        return run_control.output(self.folder)

    def start(self) -> str:
        """Submit it, unless it has ended or its job is there already -> the state of the job. Raises LaunchError."""
        if self.is_decided:
            return "has ended already"
        try:
            is_submitted = not run_control.is_over(self.folder)
        except ConfigError:
            is_submitted = False
        if not is_submitted:
            self.prepare_folder()
            with redirect_stdout(StringIO()):  # of `lockstep train`, for one run
                launch_run.launch(self.recipe, ("--resume", "auto", *self.trust))
        return run_control.status(self.folder)[0]

    def look(self) -> SweepTrial | None:
        """Return the trial as it ended; None while its job runs. Raises LaunchError if the scheduler never answers."""
        is_over = self.is_decided or self._is_over()
        self.follow(RunReader(self.folder).state())
        if self.pruned_at is not None and not (is_over or self.is_cancelled):
            run_control.cancel(self.folder)
            self.is_cancelled = True
        return self.ended(0 if self.is_decided else 1) if is_over else None

    def _is_over(self) -> bool:
        try:
            is_over = run_control.is_over(self.folder)
        except LaunchError:
            self.failures += 1
            if self.failures > MOST_FAILURES:
                raise
            return False
        self.failures = 0
        return is_over
