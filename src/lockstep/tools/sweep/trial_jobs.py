"""A trial of a sweep as a job of a scheduler, which goes on when the sweep is ended."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO

from lockstep.base.errors import ConfigError, LaunchError
from lockstep.launch import launch_run, run_control
from lockstep.observe.watch.run_state import RunReader
from lockstep.tools.sweep.sweep_state import SweepTrial
from lockstep.tools.sweep.trial_training import TrialTraining

MOST_FAILURES = 150
"""Times in a row that a scheduler may not answer: for 5 minutes and more."""


@dataclass(kw_only=True)
class TrialJob:
    """A trial that a scheduler runs."""

    training: TrialTraining
    trust: Sequence[str]
    failures: int = field(default=0, init=False)
    is_cancelled: bool = field(default=False, init=False)

    @property
    def is_submitted(self) -> bool:
        """Whether a job of an earlier start of the sweep is still there."""
        try:
            return not run_control.is_over(self.training.folder)
        except ConfigError:
            return False

    def start(self) -> str:
        """Submit it, unless it has ended or a job is there already -> the state of the job. Raises LaunchError."""
        if self.training.is_decided:
            return "has ended already"
        if not self.is_submitted:
            self.training.prepare_folder()
            with redirect_stdout(StringIO()):  # of `lockstep train`, for one run
                launch_run.launch(self.training.recipe, ("--resume", "auto", *self.trust))
        return run_control.status(self.training.folder)[0]

    def look(self) -> SweepTrial | None:
        """The trial as it ended; None while its job goes on. Raises LaunchError if the scheduler never answers."""
        training = self.training
        is_over = training.is_decided or self._is_over()
        training.follow(RunReader(training.folder).state())
        if training.pruned_at is not None and not (is_over or self.is_cancelled):
            run_control.cancel(training.folder)
            self.is_cancelled = True
        return training.ended(0 if training.is_decided else 1) if is_over else None

    def _is_over(self) -> bool:
        try:
            is_over = run_control.is_over(self.training.folder)
        except LaunchError:
            self.failures += 1
            if self.failures > MOST_FAILURES:
                raise
            return False
        self.failures = 0
        return is_over
