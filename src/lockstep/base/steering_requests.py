"""What an observer may ask of a run: it returns one of these, or a list of them, from `notice`."""

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
