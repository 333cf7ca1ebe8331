"""Starts the processes of a trial through the launcher, as `lockstep train` does, and passes their exit code on.

python -m lockstep.tools.trial_launcher CONFIG.yaml PROCESSES cpu|any TASK REQUEST.json [--trust-code]
"""

import sys
from dataclasses import replace
from pathlib import Path

from lockstep.base.contracts import Request
from lockstep.base.errors import Interrupted
from lockstep.base.lifetime import end_with_parent
from lockstep.launch.elastic import environment
from lockstep.run import recipe as recipes

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def main(argv: list[str]) -> int:
    """Plan one process, which is allowed on any machine, then set the real number: hidden GPUs do not count."""
    end_with_parent("SIGTERM")
    config, processes, device, task, request, *allowed = argv
    recipe = recipes.load(Path(config))
    environment.set_threads(recipe.run.threads)
    from lockstep.launch import launch_run  # noqa: PLC0415 (imports torch)

    alone = recipe.launch.model_copy(update={"processes": 1})
    launcher = launch_run.build_launcher(recipe.model_copy(update={"launch": alone}))
    arguments = ("--task", task, "--request", request, *allowed)
    plan = launcher.plan(Request(recipe=Path(config), arguments=arguments))
    variables = {**plan.environment, **(NO_GPUS if device == "cpu" else {})}
    plan = replace(
        plan, processes=int(processes), environment=variables, modules=launch_run.worker_modules(recipe, arguments)
    )
    try:
        return launcher.run(plan, recipe.folder / "logs")
    except Interrupted as error:
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
