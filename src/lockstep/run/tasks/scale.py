"""A run of `lockstep scale`: training, with an evaluation at its end that takes no time."""

from dataclasses import replace
from pathlib import Path

from lockstep.base.world import World
from lockstep.core.host.signals import SignalWatch
from lockstep.data.dataset import spread_evenly
from lockstep.recipe.components import Components
from lockstep.recipe.recipe import Recipe
from lockstep.run.tasks._task import Hooks
from lockstep.run.tasks.train import TrainTask

NEEDS_GROUP = True
TEST_SAMPLES = 16


class FewTestSamples(Hooks):
    def assembled(self, parts: Components) -> Components:
        return replace(parts, data=replace(parts.data, test=spread_evenly(parts.data.test, TEST_SAMPLES)))


def build(recipe: Recipe, world: World, signals: SignalWatch, *, request: Path | None, began: float) -> TrainTask:
    """Build the task; the recipe says everything else."""
    return TrainTask(recipe, world, signals, began=began, hooks=FewTestSamples())
