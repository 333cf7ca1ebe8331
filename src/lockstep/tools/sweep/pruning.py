"""Whether a trial that is under way is ended early: a pure function of its evaluations and of earlier trials."""

from collections.abc import Sequence
from statistics import median

from lockstep.checkpoint.retention import is_better
from lockstep.tools.sweep.sweep_state import Measured, Sweep

LEAST_TRIALS = 3
"""So many earlier trials have to have reached an evaluation before one is judged by it."""


def clearly_worse(sweep: Sweep, evaluations: Sequence[Measured]) -> int | None:
    """The index of the first evaluation that is worse than the median of earlier trials' same one; None for none.

    The same one is that of the same number: with another batch it comes after another step.
    """
    for index, own in enumerate(evaluations):
        reached = [t.evaluations[index].value for t in sweep.ended if len(t.evaluations) > index]
        values = [value for value in reached if value is not None]
        if len(values) >= LEAST_TRIALS and is_better(sweep.metric, median(values), own.value):
            return index
    return None
