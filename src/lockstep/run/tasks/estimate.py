"""A process that measures, alone or at the same time as others; or one that tries strategies together with others,
which it does in a fresh one, since what was done before changes how fast a process gets memory.

python -m lockstep.run.tasks.estimate FOLDER SECONDS CONFIG.yaml "STRATEGY ..."
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.base import plugins, storage
from lockstep.base.errors import LockstepError
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.distributed.bandwidth import bandwidth
from lockstep.core.numerics.precision import fix_numerics
from lockstep.run import recipe as recipes
from lockstep.run import worker
from lockstep.run.recipe import Recipe
from lockstep.tools.estimate.measurements import Measurements
from lockstep.tools.estimate.process_measurement import Measurement
from lockstep.tools.estimate.strategy_timing import timed_strategies


def main(argv: list[str]) -> int:
    """Write facts-RANK.json into the folder, or trials-RANK.json where strategies are named; returns the exit code."""
    folder, seconds, config, strategies = Path(argv[0]), float(argv[1]), Path(argv[2]), argv[3].split()
    worker.append_to_logs()
    world = World.from_environment()
    device = process_group.device_of(world)
    try:
        recipe = recipes.load(config)
        fix_numerics(threads=recipe.run.threads, exact=recipe.run.reproducibility == "exact")
        if strategies:
            with process_group.opened(world, device):
                trials = timed_strategies(recipe, strategies, world=world, device=device, seconds=seconds)
            storage.write(folder / f"trials-{world.rank}.json", json.dumps(trials))
        else:
            measured(recipe, world, device, seconds=seconds).write(folder / f"facts-{world.rank}.json")
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def measured(recipe: Recipe, world: World, device: torch.device, *, seconds: float) -> Measurements:
    """Links first, all together; then each process for itself, at the same time."""
    for sink in recipe.observe.sinks:  # part of what a process holds
        plugins.find("observe.sinks", sink)
    found = None
    if world.size > 1:
        with process_group.opened(world, device):
            found = bandwidth(device)
    with process_group.opened(World(), device):
        facts = Measurement(recipe=recipe, device=device, seconds=seconds).facts()
    return replace(facts, links=found)


if __name__ == "__main__":
    worker.leave(main(sys.argv[1:]))
