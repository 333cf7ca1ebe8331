"""An observer's file that halves the learning rate after step 2, once."""

SLOWS = """
from pathlib import Path

import lockstep
from lockstep.base.events import StepDone


class Slows:
    def notice(self, event):
        return lockstep.ScaleLearningRate(0.5) if isinstance(event, StepDone) and event.step == 2 else None

    def close(self):
        pass


def observers(options):
    with Path(__file__).with_name("asked").open("a") as file:
        file.write("x")
    return [Slows()]
"""
