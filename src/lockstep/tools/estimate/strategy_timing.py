"""Short trainings with each strategy on the processes at hand: what a step takes that cannot be computed.

V = shards of a step.
"""

import statistics
import time
from contextlib import suppress

import torch

from lockstep.base import plugins
from lockstep.base.config import PluginSection
from lockstep.base.errors import LockstepError
from lockstep.base.world import World
from lockstep.core.distributed.collectives import Agreement, broadcast_object
from lockstep.run import build
from lockstep.run.recipe import Recipe
from lockstep.training.step import step

MOST_SHARDS = 8
"""Of a step of a trial: the others are like these."""
WARM_UP = 2
LEAST_STEPS, MOST_STEPS = 3, 40


def timed_strategies(
    recipe: Recipe, names: list[str], *, world: World, device: torch.device, seconds: float
) -> dict[str, float]:
    """Name of a strategy -> seconds of a steady step of `shortened(recipe)`; those that cannot run here are left out.

    All ranks have to call it, in the open process group. `seconds`: how long each trial goes on, at least. Those that
    return memory to the system come first, since the others keep it.
    """
    found = {}
    for name in sorted(names, key=lambda name: not plugins.find("parallel.strategies", name).Config.FILLS):
        trial = shortened(recipe).model_copy(update={"parallel": section_of(recipe, name)})
        with suppress(LockstepError):  # its forecast will say why
            found[name] = step_seconds(trial, world, device, seconds=seconds)
    return found


def shortened(recipe: Recipe) -> Recipe:
    """With at most so many micro-batches in a step as a trial needs."""
    train = recipe.train
    batch = min(train.global_batch, MOST_SHARDS * train.micro_batch)
    return recipe.model_copy(update={"train": train.model_copy(update={"global_batch": batch})})


def section_of(recipe: Recipe, name: str) -> PluginSection:
    """A strategy's settings: the config's where it is the config's own."""
    if recipe.parallel.kind == name:
        return recipe.parallel
    made: PluginSection = plugins.find("parallel.strategies", name).Config(kind=name)
    return made


def step_seconds(recipe: Recipe, world: World, device: torch.device, *, seconds: float) -> float:
    """The median over steps as the training loop makes them. Raises LaunchError, ModelError."""
    parts = build.assemble(recipe, world, device)
    agreement, steps, times, count = Agreement(flags=3), parts.steps(0), list[float](), MOST_STEPS
    while len(times) < min(count, parts.total_steps):
        begin = time.perf_counter()
        outcome = step(parts.state, next(steps), clip=recipe.optim.clip)
        outcome.numbers().tolist()
        agreement.read()
        agreement.post([False] * 3)
        times.append(time.perf_counter() - begin)
        if len(times) == WARM_UP:
            count = broadcast_object(WARM_UP + max(LEAST_STEPS, min(MOST_STEPS, round(seconds / times[-1]))))
    agreement.read()
    with suppress(ValueError):  # the loader is in the middle of a step
        steps.close()  # type: ignore[attr-defined]
    return statistics.median(times[WARM_UP:] or times)
