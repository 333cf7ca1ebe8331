"""A run whose processes write down which samples the source has given them for which step.

python recording.py launch CONFIG PROCESSES RESTARTS       starts it, as `lockstep train` does
python recording.py CONFIG [the worker's own arguments]    one process
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from lockstep.base.contracts import Request
from lockstep.base.errors import Interrupted
from lockstep.launch import launch_run
from lockstep.recipe import recipe as recipes
from lockstep.run import worker
from lockstep.run.tasks import train

NUMBERED = '''
"""The digits, each with its number."""

import numpy as np

from lockstep.data.in_memory import Images
from lockstep.data.sources import _digits as digits


class Numbered:
    def __init__(self, plain):
        self.plain, self.spec, self.lengths = plain, plain.spec, None

    def __len__(self):
        return len(self.plain)

    def __getitems__(self, indices):
        return {**self.plain.__getitems__(indices), "number": np.array(indices)}


def source(options, split):
    return Numbered(digits.build(digits.Config(kind="digits"), split))
'''


def starting(task, training):
    """Pass each step's micro-batches on, once they are written down; a slow one leaves time for faults."""
    steps, folder = training.steps, task.recipe.folder / "seen"
    folder.mkdir(exist_ok=True)
    attempt = f"{os.getppid()}x{os.environ.get('MASTER_PORT', '0')}"
    file = (folder / f"{attempt}-{task.world.rank}-{os.getpid()}.jsonl").open("a", buffering=1)

    def recorded(start):
        for micro_batches in steps(start):
            numbers = [n for m in micro_batches if not m.ghost for n in m.batch["number"].tolist()]
            file.write(json.dumps({"step": micro_batches[0].step, "numbers": numbers}) + "\n")
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            yield micro_batches

    training.steps = recorded


def launch(config, processes, restarts):
    """As `lockstep train`, with this file in the worker's place."""
    recipe = recipes.load(Path(config), [f"launch.processes={processes}", f"launch.max_restarts={restarts}"])
    launcher = launch_run.build_launcher(recipe)
    plan = launcher.plan(Request(recipe=Path(config)))
    plan = replace(plan, argv=(sys.executable, __file__, *plan.argv[plan.argv.index("-m") + 2 :]))
    try:
        return launcher.run(plan, recipe.folder / "logs")
    except Interrupted as error:
        return error.exit_code


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "launch":
        sys.exit(launch(*arguments[1:]))
    train.TrainTask.starting = starting
    sys.exit(worker.main(arguments))
