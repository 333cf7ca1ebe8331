"""Plans a sweep from a command line, or the folder of an earlier one, and checks the config of every trial."""

import os
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.base import plugins, storage
from lockstep.base.errors import ConfigError, absence, nearest
from lockstep.checkpoint.metric_modes import Mode, mode_by_name, split_sign
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.recipe_trust import SWEEP
from lockstep.tools.sweep import sweep_state
from lockstep.tools.sweep.search_space import MOST_TRIALS, drawn, grid, overrides, parse, shown
from lockstep.tools.sweep.sweep_state import CONFIG, Prune, Search, Sweep, SweepTrial

DEFAULT_TRIALS = 20
DEFAULT_JOBS = 8


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of the command line; None where the user gives none."""

    search: Search | None = None
    trials: int | None = None
    metric: str | None = None
    prune: Prune | None = None
    name: str | None = None
    jobs: int | None = None
    trusts_code: bool = False


@dataclass(frozen=True, kw_only=True)
class PlannedSweep:
    sweep: Sweep
    folder: Path
    """Absolute path of the folder with the trials' runs."""
    source: Path
    """Config that the user named, or the copy in the sweep's folder."""
    config: Path
    """Config that is read: the copy, once this sweep has written it."""
    trusts_code: bool
    jobs: int = DEFAULT_JOBS
    """Number of jobs at the scheduler at a time."""

    def recipe(self, trial: SweepTrial) -> tuple[Recipe, tuple[str, ...]]:
        """Return a trial's config and the trust arguments of its workers. Raises ConfigError, UntrustedCode."""
        place = {"run.dir": str(self.folder), "run.name": trial.name}
        recipe = self._load({**trial.settings, **place})
        return recipe, recipe_trust.authorize(recipe, self.source, trusts=self.trusts_code)

    def _load(self, settings: dict[str, Any]) -> Recipe:
        with chdir(self.sweep.working_folder):
            return recipes.load(self.config, [*self.sweep.shared, *overrides(settings)])

    @property
    def base(self) -> Recipe:
        """Recipe with the settings that trials share."""
        return self._load({})

    def expected(self) -> list[dict[str, Any]]:
        """List the settings of all trials; for optuna, which suggests from results, some with every limit of a key."""
        keys = self.sweep.keys
        if self.sweep.search == "grid":
            return grid(keys)
        if self.sweep.search == "random":
            return drawn(keys, seed=self.base.run.seed, count=self.sweep.count)
        first = {key.key: (key.ends or key.values)[0] for key in keys}
        return [{**first, key.key: value} for key in keys for value in key.ends or key.values]


def planned(path: Path, words: list[str], options: SweepOptions) -> PlannedSweep:
    """Start a sweep, or go on with one, and save its plan. Raises UserError before any trial starts."""
    plan = _plan_from_folder(path, words, options) if path.is_dir() else _plan_from_config(path, words, options)
    if plan.sweep.search == "optuna":
        plugins.require("sweep", "optuna", what="--search optuna")
    _check_recipes(plan)
    if options.jobs is not None:
        if not plan.base.launch.SUBMITS:
            raise ConfigError("--jobs is for launch.kind=slurm, ray or kubernetes: here trials run one at a time")
        plan = replace(plan, jobs=options.jobs)
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        if plan.source != plan.folder / CONFIG:
            storage.write(plan.folder / CONFIG, plan.source.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot write to {plan.folder}: {error.strerror}; set another run.dir") from None
    plan.sweep.save(plan.folder)
    return replace(plan, config=plan.folder / CONFIG)


def _plan_from_folder(folder: Path, words: list[str], options: SweepOptions) -> PlannedSweep:
    if not (folder / SWEEP).is_file():
        raise ConfigError(f"{folder} is no sweep: {absence(folder, f'there is no {SWEEP} in it')}; name a config")
    given = {"--search": options.search, "--metric": options.metric, "--prune": options.prune, "--name": options.name}
    if surplus := [*words, *(name for name, value in given.items() if value is not None)]:
        raise ConfigError(f"{folder} says already what its sweep varies: leave out {surplus[0]}")
    sweep = sweep_state.load(folder)
    if not Path(sweep.working_folder).is_dir():
        what = f"there is no folder {sweep.working_folder}, from which relative paths in {folder / CONFIG} count"
        raise ConfigError(f"{what}; give the sweep's config and settings again")
    sweep.count = _count(sweep.search, options.trials, sweep.count)
    own, config = folder.absolute(), folder.absolute() / CONFIG
    return PlannedSweep(sweep=sweep, folder=own, source=config, config=config, trusts_code=options.trusts_code)


def _plan_from_config(path: Path, words: list[str], options: SweepOptions) -> PlannedSweep:
    swept, shared = parse(words)
    recipe = recipes.load(path, shared)
    if not swept:
        raise ConfigError("say what to vary: a setting with several values, such as optim.lr=1e-4,3e-4,1e-3")
    name = options.name or f"{recipe.run.name or path.stem}-sweep"
    named = recipes.load(path, [*shared, *overrides({"run.name": name})])
    search = options.search or "grid"
    metric, mode = _metric(recipe, options.metric)
    prune = options.prune or ("median" if search == "optuna" else "none")
    every = len(grid(swept)) if search == "grid" else DEFAULT_TRIALS
    sweep = Sweep(
        keys=swept,
        shared=shared,
        search=search,
        count=_count(search, options.trials, every),
        metric=metric,
        mode=mode,
        prune=prune,
        working_folder=str(Path.cwd()),
    )
    plan = PlannedSweep(sweep=sweep, folder=named.folder, source=path, config=path, trusts_code=options.trusts_code)
    if (plan.folder / SWEEP).is_file():
        return _continue_sweep(plan, recipe)
    if any((plan.folder / name).exists() for name in ("recipe.yaml", "launch.yaml")):
        raise ConfigError(f"{plan.folder} is a run, not a sweep: choose another --name")
    return plan


def _count(search: Search, requested: int | None, default: int) -> int:
    if requested is None:
        return default
    if search == "grid":
        raise ConfigError("--trials belongs to --search random or optuna: a grid tries every combination")
    if not 1 <= requested <= MOST_TRIALS:
        raise ConfigError(f"--trials {requested}: give a number from 1 to {MOST_TRIALS:,}")
    return requested


def _continue_sweep(plan: PlannedSweep, recipe: Recipe) -> PlannedSweep:
    """Take over the trials of the sweep in the folder, if it is the same one; it may get more. Raises ConfigError."""
    stored, sweep = sweep_state.load(plan.folder), plan.sweep
    flags = [
        (f"--search {each.search}", f"--metric {each.metric}", f"--prune {each.prune}", *map(str, each.keys))
        for each in (sweep, stored)
    ]
    other = next((f"{a} instead of {b}" for a, b in zip(*flags, strict=False) if a != b), None)
    if other is None and _trial_settings(recipe) != _trial_settings(recipes.load(plan.folder / CONFIG, stored.shared)):
        other = "its config has changed"
    if other is not None or len(sweep.keys) != len(stored.keys):
        what = f"{plan.folder} is another sweep ({other or 'of other keys'}): choose another --name"
        raise ConfigError(f"{what}, or go on with lockstep sweep {os.path.relpath(plan.folder)}")
    sweep.trials = stored.trials
    return plan


def _trial_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that trials share, without those of the machine and the names of runs."""
    sections = recipe.model_dump(mode="json", exclude={"launch"})
    return {**sections, "run": {**sections["run"], "name": None, "dir": None}}


def _metric(recipe: Recipe, requested: str | None) -> tuple[str, Mode]:
    """Return the metric to compare, and whether smaller or larger values are better. Raises ConfigError."""
    checkpoint, train = recipe.checkpoint, recipe.train
    metric, mode = split_sign(requested or checkpoint.best or train.stop_metric or "loss")
    known_names, reported = recipes.metric_names(recipe), recipe.evaluate.metrics
    if metric not in known_names and recipe.model.code is None:
        there_is = f"{nearest(metric, known_names)} (there is: {', '.join(known_names)})"
        raise ConfigError(f"--metric: there is no {metric!r}{there_is}")
    if reported != "auto" and metric not in ("loss", *reported):
        raise ConfigError(f"--metric: {metric!r} is not among evaluate.metrics={','.join(reported)}: add it there")
    set_for = {train.stop_metric: train.stop_mode, checkpoint.best: checkpoint.mode}
    known = [each for each in (mode, set_for.get(metric, "auto"), mode_by_name(metric)) if each not in ("auto", None)]
    if not known:
        what = f"nothing says whether smaller or larger values of {metric!r} are better"
        raise ConfigError(f"{what}: give --metric -{metric} or +{metric}")
    return metric, known[0] or "auto"


def _check_recipes(plan: PlannedSweep) -> None:
    """Raise ConfigError for settings that are invalid in a trial, and for runs that a sweep cannot start."""
    for settings in plan.expected():
        try:
            recipe, _ = plan.recipe(SweepTrial(number=1, settings=settings))
        except ConfigError as error:
            raise ConfigError(f"with {settings_text(settings)}:\n{error}") from None
    launch = recipe.launch
    if launch.max_nodes > 1 and not launch.SUBMITS:
        what = f"launch.nodes={launch.nodes}: with launch.kind={launch.kind} a sweep runs on this machine"
        raise ConfigError(f"{what}; set launch.nodes=1")
    if plan.sweep.prune != "none" and "jsonl" not in recipe.observe.sinks:
        raise ConfigError("observe.sinks: pruning reads metrics.jsonl; add jsonl, or give --prune none")


def settings_text(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={shown(value)}" for key, value in settings.items())
