"""Starts the processes that measure through the launcher, as `lockstep train` does.

python -m lockstep.tools.estimate.measurement_launcher PROCESSES FOLDER SECONDS CONFIG.yaml "STRATEGY ..."
"""

import sys
from dataclasses import replace
from pathlib import Path

from lockstep.base.contracts import Request
from lockstep.base.errors import Interrupted
from lockstep.core.host.lifetime import end_with_parent
from lockstep.launch import launch_run
from lockstep.run import recipe as recipes


def main(argv: list[str]) -> int:
    """The launcher's plan with a measuring process in the worker's place."""
    end_with_parent("SIGTERM")
    processes, folder, _, config, *_ = argv
    recipe = recipes.load(Path(config))
    launcher = launch_run.launcher_of(recipe)
    plan = launcher.plan(Request(recipe=Path(config)))
    measuring = (plan.argv[0], "-P", "-m", "lockstep.run.tasks.estimate", *argv[1:])
    try:
        return launcher.run(replace(plan, argv=measuring, processes=int(processes)), Path(folder) / "logs")
    except Interrupted as error:
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
