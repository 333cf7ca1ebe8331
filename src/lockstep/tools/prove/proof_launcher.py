"""Starts one run of a proof through the launcher, as `lockstep train` does, and ends with its exit code.

python -m lockstep.tools.prove.proof_launcher TASK.json CONFIG.yaml PROCESSES cpu|any
"""

import sys
from dataclasses import replace
from pathlib import Path

from lockstep.base import trust
from lockstep.base.contracts import Request
from lockstep.base.errors import Interrupted
from lockstep.core.host.lifetime import end_with_parent
from lockstep.launch import launch_run
from lockstep.run import recipe as recipes

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""What keeps a process from seeing any GPU."""


def main(argv: list[str]) -> int:
    """The launcher's plan with a proof's process in the worker's place."""
    end_with_parent("SIGTERM")
    task, config, processes, device = argv
    recipe = recipes.load(Path(config))
    alone = recipe.launch.model_copy(update={"processes": 1})  # as many as there are GPUs, else: but they may be hidden
    launcher = launch_run.launcher_of(recipe.model_copy(update={"launch": alone}))
    decided = (trust.OPTION,)  # by whoever has asked for the proof
    plan = launcher.plan(Request(recipe=Path(config), arguments=decided))
    plan = replace(
        plan,
        argv=(plan.argv[0], "-P", "-m", "lockstep.run.tasks.proof", task, *plan.module[1:]),
        processes=int(processes),
        environment={**plan.environment, **(HIDDEN if device == "cpu" else {})},
    )
    try:
        return launcher.run(plan, recipe.folder / "logs")
    except Interrupted as error:
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
