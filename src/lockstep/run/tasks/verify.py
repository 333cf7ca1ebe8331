"""An interval of a run for `lockstep verify`: training from a checkpoint, or the start, to the step of a later one."""

from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.base.errors import ConfigError
from lockstep.base.world import World
from lockstep.checkpoint import layout
from lockstep.core.host.signals import SignalWatch
from lockstep.recipe.recipe import Recipe
from lockstep.run.tasks.train import TrainTask
from lockstep.tools import trials
from lockstep.tools.verify.verification import SegmentRequest
from lockstep.training.loop_state import Training

NEEDS_GROUP = True


class SegmentTask(TrainTask):
    """Trains an interval, unless recipe, data or machine are others than those of its checkpoint."""

    def __init__(self, request: SegmentRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = request

    def run(self, resume: str, *, allow_drift: bool) -> None:
        super().run(str(self.request.checkpoint or "auto"), allow_drift=allow_drift)

    def load_checkpoint(self, resume: str, *, allow_drift: bool) -> Path | None:
        """Write down what differs; the checkpoint at the beginning may have other settings, changed on a resume."""
        found = [each for each in layout.differences(self.request.numeric, self.numeric) if None not in each[1:]]
        trials.write_result(self.recipe.folder, self.world.rank, found)
        if found:
            raise ConfigError("; ".join(layout.described(*each) for each in found))
        return super().load_checkpoint(resume, allow_drift=True)

    def resume_observers(self, checkpoint: Path | None, *, repeats: bool) -> None:
        """Repeat what the run's observers asked for; they are not asked again."""
        self.steering.start(self.parts.state.step, repeats=True)

    def wired(self) -> Training:
        """Build the loop, without an evaluation, which ends at the step."""
        training, until = super().wired(), self.request.until
        steps, training.total_steps, training.evaluate = training.steps, until, None
        training.steps = lambda start: islice(steps(start), until - start)
        return training


def build(recipe: Recipe, world: World, signals: SignalWatch, *, request: Path, began: float) -> SegmentTask:
    """Build the task from its request file."""
    return SegmentTask(SegmentRequest.model_validate_json(request.read_bytes()), recipe, world, signals, began=began)
