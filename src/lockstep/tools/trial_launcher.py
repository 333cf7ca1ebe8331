"""Starts the processes of a trial through the launcher, as `lockstep train` does, and passes their exit code on.

python -m lockstep.tools.trial_launcher CONFIG.yaml PROCESSES TASK REQUEST.json [--trust-code]
"""

import sys
from dataclasses import replace
from pathlib import Path

from lockstep.base.contracts import Request
from lockstep.base.errors import Interrupted
from lockstep.base.lifetime import end_with_parent
from lockstep.protocol import environment
from lockstep.recipe import recipe as recipes


def main(argv: list[str]) -> int:
    """Run the trial to its end -> exit code."""
    end_with_parent("SIGTERM")
    config, processes, task, request, *allowed = argv
    recipe = recipes.load(Path(config))
    environment.set_threads(recipe.run.threads)
    from lockstep.launch import launch_run  # noqa: PLC0415 (imports torch)

    launch = recipe.launch.model_copy(update={"processes": 1})  # which is allowed on any machine
    launcher = launch_run.build_launcher(recipe.model_copy(update={"launch": launch}))
    arguments = ("--task", task, "--request", request, *allowed)
    with launch_run.using_devices(recipe):
        plan = launcher.plan(Request(recipe=Path(config), arguments=arguments))
        modules = launch_run.worker_modules(recipe, arguments)
        try:
            return launcher.run(replace(plan, processes=int(processes), modules=modules), recipe.folder / "logs")
        except Interrupted as error:
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
