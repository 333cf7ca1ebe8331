"""Fork a run: a new one from one of its checkpoints, with other settings, or as if it had never seen some samples."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.base.errors import CheckpointError, ConfigError
from lockstep.checkpoint import layout
from lockstep.data.exclusion import excluded_samples
from lockstep.observe.run_folder import RunFolder
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust, run_paths
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.run_names import LONGEST_NAME
from lockstep.tools.trials import prepared
from lockstep.training.resume import problem

FIXED = ("data.limit", "train.global_batch")
"""Settings that decide which place in the data a step is."""


def planned(
    run: Path, settings: Sequence[str], *, at: int | None, without: Path | None, from_start: bool, trusts: bool
) -> tuple[Recipe, tuple[str, ...], str]:
    """Return a new run, the arguments of its workers, and a sentence on where it begins: at the newest checkpoint at or
    before a step, or before the first use of the samples that it is to leave out. Raises UserError."""
    parent, root, named = run_paths.locate(run)
    file, begins_at = root.parent / "recipe.yaml", layout.step_of(named) if named and at is None else at
    if without:
        excluded = json.dumps([*map(str, parent.data.exclude), str(without.absolute())])
        settings = [*settings, f"data.exclude={excluded}"]
    recipe = recipes.load(file, ["run.name=null", *settings])
    _check(parent, recipe)
    if without and not from_start and recipe.train.class_weights == "balanced":
        why = "train.class_weights=balanced has counted the classes of these samples in each step"
        raise ConfigError(f"{why}: --from-start trains anew without them")
    trust = recipe_trust.authorize(recipe, file, trusts=trusts)
    checkpoint, what = None, "anew"
    if not from_start:
        first = _first_use(parent, recipe, root) if without and begins_at is None else None
        begins_at = begins_at if first is None else first
        checkpoint = _newest(root, begins_at, recipe, is_first=first is not None)
        what = f"on after step {layout.step_of(checkpoint)} of {root.parent}"
        if begins_at not in (None, layout.step_of(checkpoint)):
            what += f", whose newest checkpoint up to step {begins_at} this is"
    start = f"at-{layout.step_of(checkpoint) if checkpoint else 0}"
    suffix = f"without-{recipes.name_part(without)}" if without else start
    name = f"{parent.run.name}-{suffix}".encode()[:LONGEST_NAME].decode(errors="ignore")
    section = recipes.RunSection(**{**dict(recipe.run), "name": recipe.run.name or name, "parent": checkpoint})
    recipe = recipe.model_copy(update={"run": section})
    if RunFolder(recipe.folder).has_settings:
        raise ConfigError(f"{recipe.folder} is a run already: choose another --name, or go on with `lockstep train`")
    return recipe, trust, f"{recipe.folder} trains {what}"


def _check(parent: Recipe, recipe: Recipe) -> None:
    """Raise ConfigError for settings with which the run cannot go on."""
    for key in FIXED:
        section, _, field = key.partition(".")
        before, now = (getattr(getattr(each, section), field) for each in (parent, recipe))
        if before != now:
            what = f"{key} is {before} in the run, and decides which place in the data a step is"
            advice = f"a fork cannot change it; model.init={parent.folder} starts anew with its weights"
            raise ConfigError(f"{what}: {advice}")


def _first_use(parent: Recipe, recipe: Recipe, root: Path) -> int | None:
    """Return the number of steps before the first with a sample that only the new run leaves out; None where no step of
    the run had one."""
    data, known = prepared(recipe), layout.listed(root)
    new = np.setdiff1d(data.excluded, excluded_samples(parent.data.exclude, data.train))
    return data.order().first_use(new, layout.step_of(known[0]) if known else 0)


def _newest(root: Path, at: int | None, recipe: Recipe, *, is_first: bool) -> Path:
    """Return the newest whole checkpoint of step `at` or before, where `is_first`: the next has one of the samples.
    Raises CheckpointError, with what another start would cost."""
    steps = {folder: layout.step_of(folder) for folder in layout.listed(root)}
    for folder, step in steps.items():
        if (at is None or step <= at) and problem(folder) is None:
            return folder
    summary = RunFolder(root.parent).summary()
    done, speed = summary.steps or max(steps.values(), default=0), summary.train_samples_per_second
    minutes = f", about {done * recipe.train.global_batch / speed / 60:,.1f} min" if speed else ""
    why = f" (step {at + 1} was the first with one of these samples)" if is_first and at is not None else ""
    raise CheckpointError(
        f"{root.parent} keeps no whole checkpoint{f' of step {at} or before' if at is not None else ''}{why}"
        + (f"; the oldest is of step {min(steps.values())}" if steps else "")
        + f". --from-start trains anew: {done:,} steps{minutes}"
    )
