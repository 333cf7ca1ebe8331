"""A run of `lockstep gate`: the first steps of a training, traced, without an evaluation."""

from pathlib import Path

from lockstep.base.model_contracts import MicroBatch
from lockstep.base.world import World
from lockstep.core.host.signals import SignalWatch
from lockstep.recipe.components import Components
from lockstep.recipe.recipe import Recipe
from lockstep.run.tasks._task import Hooks
from lockstep.run.tasks.prove import write_trace
from lockstep.run.tasks.train import TrainTask
from lockstep.tools.gate.gating import TRACE, GateRequest
from lockstep.training.loop_state import Training

NEEDS_GROUP = True
TRACED_SHARDS = 8
"""Number of the first shards of a step whose calls and gradients are traced, for the size of a golden file."""


class FirstSteps(Hooks):
    """Ends a training early; the schedule stays that of the whole run."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def starting(self, task: TrainTask, parts: Components, training: Training) -> None:
        parts.total_steps = training.total_steps = steps = min(self.steps, parts.total_steps)
        training.evaluate = None

        def selects(micro_batch: MicroBatch) -> bool:
            return micro_batch.step in (0, steps // 2) and micro_batch.shard < TRACED_SHARDS

        write_trace(task.recipe.folder / TRACE, parts, training, is_main=True, selects=selects)


def build(recipe: Recipe, world: World, signals: SignalWatch, *, request: Path, began: float) -> TrainTask:
    """Build the task from its request file."""
    steps = GateRequest.model_validate_json(request.read_bytes()).steps
    return TrainTask(recipe, world, signals, began=began, hooks=FirstSteps(steps))
