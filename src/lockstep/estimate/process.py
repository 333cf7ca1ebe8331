"""A process that measures: alone, or at the same time as others on as many cores.

python -m lockstep.estimate.process FOLDER SECONDS CONFIG.yaml
"""

import sys
from dataclasses import replace
from pathlib import Path

from lockstep import plugins, worker
from lockstep import recipe as recipes
from lockstep.errors import LockstepError
from lockstep.estimate.measure import Measurement
from lockstep.recipe import Recipe
from lockstep.runtime import process_group
from lockstep.runtime.links import links
from lockstep.runtime.precision import fix_numerics
from lockstep.world import World


def main(argv: list[str]) -> int:
    """Write facts-RANK.json into the folder; returns the exit code."""
    folder, seconds, config = Path(argv[0]), float(argv[1]), Path(argv[2])
    worker.append_to_logs()
    world = World.from_environment()
    try:
        recipe = recipes.load(config)
        measure(recipe, world, folder, seconds=seconds)
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def measure(recipe: Recipe, world: World, folder: Path, *, seconds: float) -> None:
    """Links first, all together; then each process for itself, at the same time."""
    device = process_group.device_of(world)
    fix_numerics(threads=recipe.run.threads, exact=recipe.run.reproducibility == "exact")
    for sink in recipe.observe.sinks:  # part of what a process holds
        plugins.find("observe.sinks", sink)
    found = None
    if world.size > 1:
        with process_group.opened(world, device):
            found = links(device)
    with process_group.opened(World(), device):
        facts = Measurement(recipe=recipe, device=device, seconds=seconds).facts()
    replace(facts, links=found).write(folder / f"facts-{world.rank}.json")


if __name__ == "__main__":
    worker.leave(main(sys.argv[1:]))
