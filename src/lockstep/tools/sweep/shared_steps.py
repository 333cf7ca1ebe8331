"""Steps that two trials have in common are run once: the later trial goes on from a checkpoint of the earlier one."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import layout
from lockstep.observe.run_folder import RunFolder
from lockstep.recipe import recipe as recipes
from lockstep.recipe.recipe import Recipe
from lockstep.training.learning_rate import learning_rate
from lockstep.training.resume import problem

LATE: Mapping[str, Any] = {
    "run": {"name"},
    "schedule": True,
    "evaluate": True,
    "train": {"steps", "epochs", "stop_metric", "stop_mode", "stop_patience"},
}
"""Settings that change no weight before a step that is known: the first with another learning rate, or the end. Trials
that differ in any other setting share nothing."""


def forked(recipe: Recipe, earlier: Iterable[Recipe]) -> Recipe:
    """Return a trial's recipe so that it goes on from the newest checkpoint up to which it is the same training as an
    earlier trial, if there is one.

    Not with checkpoint.best, whose checkpoint may be one of the earlier trial, nor with observers of the user's, nor
    where the day on which a trial begins is in its texts.
    """
    has_begun, is_dated = layout.listed(recipe.folder / "checkpoints"), recipe.data.CHATS and recipe.data.date is None
    if has_begun or is_dated or recipe.checkpoint.best or recipe.observe.file or recipe.run.parent:
        return recipe
    found = [each for other in earlier if (each := _newest_shared(recipe, other))]
    if not found:
        return recipe
    parent = max(found, key=layout.step_of)
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"parent": parent})})


def _newest_shared(recipe: Recipe, other: Recipe) -> Path | None:
    """Return the newest whole checkpoint of another trial that this one would have, too."""
    if recipe.model_dump(exclude=LATE) != other.model_dump(exclude=LATE) or not _stops_later(recipe, other):
        return None
    lines = [line for line in RunFolder(other.folder).history() if line.kind == "started" and line.steps_per_epoch]
    if not lines:
        return None
    ends = [each.train.total_steps(lines[-1].steps_per_epoch) for each in (recipe, other)]
    last = (min(ends) if recipe.train.stop_metric else ends[0]) - 1  # its own end, or one that early stopping knows
    kept = [each for each in layout.listed(other.folder / "checkpoints") if layout.step_of(each) <= last]
    equal = _equal_rates(recipe, other, ends, most=max(map(layout.step_of, kept), default=0))
    shared = (each for each in kept if layout.step_of(each) <= equal and problem(each) is None)
    return next((each for each in shared if _has_equal_code(other, layout.read_manifest(each))), None)


def _has_equal_code(recipe: Recipe, manifest: layout.Manifest) -> bool:
    """Return whether no file of the user's has changed since a checkpoint."""
    numeric = recipes.numeric_recipe(recipe, {}, processes=manifest.world_size)
    return all(None in each[1:] for each in layout.differences(manifest.numeric, numeric))


def _stops_later(recipe: Recipe, other: Recipe) -> bool:
    """Return whether early stopping, if the trial has it, would not have ended it where the other went on. How many
    evaluations in a row were no better is in the checkpoint."""
    one, two = recipe.train, other.train
    is_same = (one.stop_metric, one.stop_mode, recipe.evaluate) == (two.stop_metric, two.stop_mode, other.evaluate)
    return one.stop_metric is None or (is_same and one.stop_patience >= two.stop_patience)


def _equal_rates(recipe: Recipe, other: Recipe, ends: list[int], *, most: int) -> int:
    """Return the number of first steps with equal learning rates, at most `most`."""
    pairs = list(zip((recipe, other), ends, strict=True))
    if (recipe.schedule, ends[0]) == (other.schedule, ends[1]):
        return most
    if "user" in (recipe.schedule.shape, other.schedule.shape):
        return 0
    for step in range(most):
        one, two = (
            learning_rate(r.optim, r.schedule, step=step, total_steps=end, global_batch=r.train.global_batch)
            for r, end in pairs
        )
        if one != two:
            return step
    return most
