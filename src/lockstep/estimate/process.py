"""A process that measures, alone or at the same time as others, and tries strategies together with them.

python -m lockstep.estimate.process FOLDER SECONDS CONFIG.yaml measure|try STRATEGY,...
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from lockstep import files, plugins, worker
from lockstep import recipe as recipes
from lockstep.errors import LockstepError
from lockstep.estimate.facts import Facts
from lockstep.estimate.measure import Measurement
from lockstep.estimate.trials import tried
from lockstep.recipe import Recipe
from lockstep.runtime import process_group
from lockstep.runtime.links import links
from lockstep.runtime.precision import fix_numerics
from lockstep.world import World


def main(argv: list[str]) -> int:
    """Write facts-RANK.json (to measure) and trials-RANK.json into the folder; returns the exit code."""
    folder, seconds, config, task, strategies, *_ = argv
    worker.append_to_logs()
    world = World.from_environment()
    device = process_group.device_of(world)
    try:
        recipe = recipes.load(Path(config))
        fix_numerics(threads=recipe.run.threads, exact=recipe.run.reproducibility == "exact")
        facts = measured(recipe, device, seconds=float(seconds)) if task == "measure" else None
        with process_group.opened(world, device):
            if facts is not None:
                found = links(device) if world.size > 1 else None
                replace(facts, links=found).write(Path(folder) / f"facts-{world.rank}.json")
            names = list(filter(None, strategies.split(",")))
            trials = tried(recipe, names, world=world, device=device, seconds=float(seconds))
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    files.write(Path(folder) / f"trials-{world.rank}.json", json.dumps(trials))
    return 0


def measured(recipe: Recipe, device: torch.device, *, seconds: float) -> Facts:
    """Each process for itself."""
    for sink in recipe.observe.sinks:  # part of what a process holds
        plugins.find("observe.sinks", sink)
    with process_group.opened(World(), device):
        return Measurement(recipe=recipe, device=device, seconds=seconds).facts()


if __name__ == "__main__":
    worker.leave(main(sys.argv[1:]))
