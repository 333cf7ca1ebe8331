"""Runs the trials of a sweep, each as an ordinary run, one after the other or as jobs, and shows the best."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from lockstep.base import storage
from lockstep.base.errors import ConfigError, Interrupted
from lockstep.checkpoint import layout
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.launch import launch_run
from lockstep.observe.watch.run_state import RunState
from lockstep.recipe.recipe import Recipe
from lockstep.tools.sweep import shared_steps
from lockstep.tools.sweep.sweep_plan import PlannedSweep, settings_text
from lockstep.tools.sweep.sweep_state import Sweep, SweepTrial
from lockstep.tools.sweep.sweep_table import line, number, print_sweep, svg
from lockstep.tools.sweep.trial_training import LocalTraining, TrialJob, TrialTraining
from lockstep.tools.trials import forking

PICTURE = "sweep.svg"
LOOK_SECONDS = 2.0
"""Time between two looks at jobs of a scheduler."""
Training = TypeVar("Training", bound=TrialTraining)


def run(plan: PlannedSweep, console: Console) -> int:
    """Run what is left of a sweep and print all of it -> exit code: 0, or 1 where no trial has finished. Raises
    Interrupted after Ctrl-C or SIGTERM, LaunchError where the sweep runs already."""
    sweep, folder = plan.sweep, plan.folder
    with launch_run.locked(folder, f"{folder} is run by another process; choose another --name"):
        before = f"; {len(sweep.ended)} of them ended before" if sweep.ended else ""
        console.print(f"{sweep.count} trials of {' '.join(map(str, sweep.keys))} in {folder}{before}", soft_wrap=True)
        trials, submits = Trials(plan=plan, console=console), plan.base.launch.SUBMITS
        try:
            with ended_by_sigterm():
                if submits:
                    _run_jobs(trials)
                else:
                    _run_here(trials)
        except (KeyboardInterrupt, Interrupted) as error:
            what = str(error) or "interrupted"
            jobs = "; jobs that were submitted go on" if submits else ""
            raise Interrupted(f"{what}{jobs}\ngo on with: lockstep sweep {folder}") from None
    if len(sweep.trials) < sweep.count:
        console.print(f"There are no other settings to try than those of {len(sweep.trials)} trials.", soft_wrap=True)
    print_sweep(sweep, folder, console)
    if sweep.best is None:
        console.print(f"No trial has finished; see {folder / sweep.trials[-1].name / 'logs'}", soft_wrap=True)
        return 1
    storage.write(folder / PICTURE, svg(sweep, f"{folder.name}: {sweep.metric} of {len(sweep.trials)} trials"))
    console.print(f"\nThe picture is in {folder / PICTURE}", soft_wrap=True)
    return 0


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Trials of a sweep: chooses the next one, and saves the result of each before others begin."""

    plan: PlannedSweep
    console: Console

    def trainings(self, kind: type[Training], active: Collection[Training] = ()) -> Iterator[Training]:
        """Yield the run of each trial that is neither ended nor active; one whose config is not valid has failed."""
        sweep = self.plan.sweep
        while (trial := self._next([training.trial.number for training in active])) is not None:
            try:
                recipe, trust = self.plan.recipe(trial)
            except ConfigError as error:  # of a suggestion that follows from results
                failed = {"state": "failed", "note": str(error).splitlines()[-1]}
                self.ended(trial.model_copy(update=failed))
                continue
            recipe = self._forked(trial, recipe)
            yield kind(trial=trial, recipe=recipe, trust=trust, sweep=sweep)

    def _forked(self, trial: SweepTrial, recipe: Recipe) -> Recipe:
        """Have a trial go on from a checkpoint of an earlier one, if both are the same training until there. Pruning
        compares evaluations by their number, and so needs all of them."""
        if self.plan.sweep.prune != "none":
            return recipe
        ended = (each for each in self.plan.sweep.trials if each.state == "finished")
        recipe = shared_steps.forked(recipe, (self.plan.recipe(each)[0] for each in ended))
        if (parent := recipe.run.parent) is not None:
            what = f"{trial.name} goes on after step {layout.step_of(parent)} of {parent.parents[1].name}"
            self.console.print(f"{what}: up to there both are the same training", soft_wrap=True)
        return recipe

    def _next(self, active: Collection[int]) -> SweepTrial | None:
        """Return an interrupted trial whose number is not among the active ones, or a new one; None at the end."""
        sweep = self.plan.sweep
        for trial in sweep.trials:
            if trial.state == "running" and trial.number not in active:
                return trial
        number = len(sweep.trials)
        if number >= sweep.count:
            return None
        if sweep.search == "optuna":
            from lockstep.tools.sweep import optuna_search  # noqa: PLC0415 (an extra)

            settings = optuna_search.suggestion(sweep, seed=self.plan.base.run.seed)
        else:
            settings = next(iter(self.plan.expected()[number:]), None)
        if settings is None:
            return None
        sweep.trials.append(SweepTrial(number=number + 1, settings=settings))
        sweep.save(self.plan.folder)
        return sweep.trials[-1]

    def ended(self, trial: SweepTrial) -> None:
        sweep = self.plan.sweep
        sweep.trials[trial.number - 1] = trial
        sweep.save(self.plan.folder)
        self.console.print(line(sweep, trial), soft_wrap=True)


def _run_here(trials: Trials) -> None:
    """Run trials one after the other, in processes forked from one that has imported what they need, if possible."""
    recipe = trials.plan.base
    with forking(recipe, kind=recipe.launch.kind):
        for training in trials.trainings(LocalTraining):
            with _status(trials.plan.sweep, training.trial, trials.console) as show:
                trials.ended(training.run(show))


def _run_jobs(trials: Trials) -> None:
    """Keep at most `plan.jobs` jobs at the scheduler until all trials have ended. Raises LaunchError."""
    jobs: list[TrialJob] = []
    while True:
        waiting = trials.trainings(TrialJob, jobs)
        while len(jobs) < trials.plan.jobs and (job := next(waiting, None)) is not None:
            jobs.append(job)
            text = f"{job.trial.name} · {settings_text(job.trial.settings)} · {job.start()}"
            trials.console.print(text, soft_wrap=True)
        if not jobs:
            return
        time.sleep(LOOK_SECONDS)
        for job in list(jobs):
            if (ended := job.look()) is not None:
                jobs.remove(job)
                trials.ended(ended)


@contextmanager
def _status(sweep: Sweep, trial: SweepTrial, console: Console) -> Iterator[Callable[[RunState], None]]:
    """Show the progress of a trial on a terminal; elsewhere only its start."""
    title = f"{trial.name} of {sweep.count} · {settings_text(trial.settings)}"
    if not console.is_terminal:
        console.print(f"{title} ...", soft_wrap=True)
        yield lambda _: None
        return
    with console.status(Text(title)) as spinner:

        def show(state: RunState) -> None:
            parts = [title]
            if state.start is not None:
                parts.append(f"step {state.step:,} of {state.start.lines[0].total_steps:,}")
            if state.evaluation is not None and sweep.metric in state.evaluation.values:
                parts.append(f"{sweep.metric} {number(state.evaluation.values[sweep.metric])}")
            spinner.update(Text(" · ".join(parts)))

        yield show
