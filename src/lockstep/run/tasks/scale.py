"""A run of `lockstep scale`: training, with an evaluation at its end that takes no time."""

from dataclasses import replace

from lockstep.data.dataset import spread_evenly
from lockstep.recipe.components import Components
from lockstep.run.tasks.train import TrainTask

NEEDS_GROUP = True
TEST_SAMPLES = 16


class ScaleTask(TrainTask):
    IS_TRIAL = True

    def assembled(self, parts: Components) -> Components:
        return replace(parts, data=replace(parts.data, test=spread_evenly(parts.data.test, TEST_SAMPLES)))


build = ScaleTask
