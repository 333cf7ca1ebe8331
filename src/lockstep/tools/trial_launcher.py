"""Starts the processes of a trial as `lockstep train` does, and passes their exit code on.

python -m lockstep.tools.trial_launcher PARENT CONFIG.yaml PROCESSES [ARGUMENT ...]
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from lockstep.base.contracts import Request
from lockstep.base.errors import LockstepError
from lockstep.base.lifetime import end_with_parent
from lockstep.launch import recovery
from lockstep.protocol import environment
from lockstep.recipe import recipe as recipes


def run(argv: list[str]) -> NoReturn:
    """Run the trial and exit. PARENT is the id of the process that starts this one, or 0 where it is not known;
    PROCESSES is 0 for a run of its own, with what the config says."""
    parent, config, processes, *arguments = argv
    end_with_parent("SIGTERM", int(parent) or None)
    recipe = recipes.load(Path(config))
    environment.set_threads(recipe.run.threads)
    recovery.quieten_torch(recipe)
    from lockstep.launch import launch_run  # noqa: PLC0415 (imports torch)

    try:
        if processes == "0":
            sys.exit(launch_run.launch(recipe, tuple(arguments)))
        launch = recipe.launch.model_copy(update={"processes": 1})  # which is allowed on any machine
        launcher = launch_run.build_launcher(recipe.model_copy(update={"launch": launch}))
        with launch_run.using_devices(recipe):
            plan = launcher.plan(Request(recipe=Path(config), arguments=tuple(arguments)))
            modules = launch_run.worker_modules(recipe, arguments)
            sys.exit(launcher.run(replace(plan, processes=int(processes), modules=modules), recipe.folder / "logs"))
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run(sys.argv[1:])
