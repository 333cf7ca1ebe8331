"""Requests of an observer to the run: `notice` returns one of them, or a list."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Stop:
    """End the training after the next step, with an evaluation and a checkpoint, as early stopping does."""


@dataclass(frozen=True)
class Save:
    """Save a checkpoint after the next step."""


@dataclass(frozen=True)
class Evaluate:
    """Measure the model on the test split after the next step."""


@dataclass(frozen=True)
class ScaleLearningRate:
    """Multiply the learning rate, from the step after the next one on. Raises ValueError unless 0 < factor < inf."""

    factor: float

    def __post_init__(self) -> None:
        if not (isinstance(self.factor, int | float) and 0 < self.factor < math.inf):
            raise ValueError(f"the factor of a learning rate should be a positive number, not {self.factor!r}")


Request = Stop | Save | Evaluate | ScaleLearningRate
