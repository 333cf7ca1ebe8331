"""Short trainings with each strategy on the processes at hand: the part of a step's time that cannot be computed.

V = shards of a step.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from lockstep.base import plugins
from lockstep.base.errors import LockstepError
from lockstep.base.world import World
from lockstep.core.distributed.collectives import Agreement, broadcast_object
from lockstep.parallel.strategy_config import StrategySection
from lockstep.recipe import build
from lockstep.recipe.recipe import Recipe
from lockstep.tools.trials import strategy
from lockstep.training.step import step

MOST_SHARDS = 8
"""Shards in a step of a trial, at most: further ones are like these."""
WARM_UP = 2
LEAST_STEPS, MOST_STEPS = 3, 40


def timed_strategies(
    recipe: Recipe,
    names: list[str],
    *,
    world: World,
    device: torch.device,
    seconds: float,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Time strategies -> name -> seconds of a steady step of `shortened(recipe)`, without those that cannot run here.

    Collective: all ranks call it in the open process group. `seconds`: minimum duration of each trial. `report` gets
    the name of each that begins. Strategies that return memory to the system come first, since the others keep it.
    """
    times = {}
    for name in sorted(names, key=lambda name: not plugins.find("parallel.strategies", name).Config.FILLS):
        trial = shortened(recipe).model_copy(update={"parallel": section_of(recipe, name)})
        report(f"steps with {name}")
        with suppress(LockstepError):  # its forecast says why
            times[name] = step_seconds(trial, world, device, seconds=seconds)
    return times


def shortened(recipe: Recipe) -> Recipe:
    """Return the recipe with at most MOST_SHARDS micro-batches in a step."""
    train = recipe.train
    batch = min(train.global_batch, MOST_SHARDS * train.micro_batch)
    return recipe.model_copy(update={"train": train.model_copy(update={"global_batch": batch})})


def section_of(recipe: Recipe, name: str) -> StrategySection:
    """Return the settings of a strategy: the recipe's own if it is the recipe's strategy."""
    return recipe.parallel if recipe.parallel.kind == name else strategy(name)


def step_seconds(recipe: Recipe, world: World, device: torch.device, *, seconds: float) -> float:
    """Time steps as the training loop runs them -> the median. Raises LaunchError, ModelError."""
    components = build.assemble(recipe, world, device)
    agreement, steps, times, count = Agreement(flags=3), components.steps(0), list[float](), MOST_STEPS
    while len(times) < min(count, components.total_steps):
        begin = time.perf_counter()
        outcome = step(components.state, next(steps), clip=recipe.optim.clip)
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
