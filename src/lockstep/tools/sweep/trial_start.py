"""Starts the processes of a sweep's trial as `lockstep train` does, and ends them with the sweep.

python -m lockstep.tools.sweep.trial_start PARENT RUN/launch.yaml [--trust-code]
"""

import sys
from pathlib import Path
from typing import NoReturn

from lockstep.base.errors import LockstepError
from lockstep.base.lifetime import end_with_parent
from lockstep.launch import recovery
from lockstep.protocol import environment
from lockstep.recipe import recipe as recipes


def run(argv: list[str]) -> NoReturn:
    """Run the trial and exit. PARENT is the id of the process that starts this one, or 0 where it is not known."""
    parent, config, *trust = argv
    end_with_parent("SIGTERM", int(parent) or None)
    recipe = recipes.load(Path(config))
    environment.set_threads(recipe.run.threads)
    recovery.quieten_torch(recipe)
    from lockstep.launch import launch_run  # noqa: PLC0415 (imports torch)

    try:
        sys.exit(launch_run.launch(recipe, ("--resume", "auto", *trust)))
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run(sys.argv[1:])
