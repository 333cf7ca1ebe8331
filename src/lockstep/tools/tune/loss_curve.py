"""The loss over the learning rate: smoothed, its steepest descent, its lowest point.

L. Smith, Cyclical Learning Rates for Training Neural Networks, 2017; the steepest descent of the smoothed loss is
fast.ai's way of reading it.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lockstep.base.errors import ConfigError

WINDOW = 10
"""A loss is averaged over about a tenth of the sweep: 10 steps of 100, 0.8 decades of the usual range."""
SKIPPED = 10
"""The first tenth of the sweep is ignored: its averages are over few losses."""
SLOPES = 20
"""A slope is averaged over a twentieth of the sweep: for 8 seeds on the digits the steepest rate was then between 0.007
and 0.010, with single slopes between 0.006 and 0.079."""
DIVERGED = 4.0
"""A loss this many times the best one ends the sweep (fast.ai's number)."""
NOISE = 2.0
"""The loss has to fall by this many standard deviations of its changes from step to step ..."""
LEAST_DESCENT = 0.01
"""... and by this fraction, to count as falling."""

End = Literal["done", "diverged", "not finite"]


class Smoothing:
    """An exponential moving average with bias correction, as for Adam's moments."""

    def __init__(self, steps: int) -> None:
        self.beta = max(0.0, 1 - WINDOW / steps)
        self.sum, self.count, self.best = 0.0, 0, math.inf

    def add(self, loss: float) -> float:
        """Add the next loss; returns the average up to it."""
        self.count += 1
        self.sum = self.beta * self.sum + (1 - self.beta) * loss
        value = self.sum / (1 - self.beta**self.count)
        self.best = min(self.best, value)
        return value


def has_diverged(loss: float, best: float) -> bool:
    """Return whether a smoothed loss is 4 times the best one; or as much above it where that is negative."""
    return loss > best + (DIVERGED - 1) * abs(best)


def rates_between(start: float, stop: float, steps: int) -> tuple[float, ...]:
    """Return the rates of a sweep, [steps], each the same factor above the last. Raises ConfigError for bad options."""
    if not 0 < start < math.inf:
        raise ConfigError(f"--from {start:g}: a rate is a number above 0, such as 1e-7")
    if not start < stop < math.inf:
        raise ConfigError(f"--from {start:g} --to {stop:g}: --to has to be the larger one, such as 10")
    if steps < 10:
        raise ConfigError(f"--steps {steps}: that is too few to see a curve; take 10 or more (100 is usual)")
    return tuple(start * (stop / start) ** (number / (steps - 1)) for number in range(steps))


@dataclass(kw_only=True)
class Curve:
    """The losses of a sweep; n = its steps with a finite loss."""

    rates: np.ndarray
    """Float64 [n], rising."""
    losses: np.ndarray
    """Mean loss over the global batch of each step, before its update, float64 [n]."""
    steps: int
    end: End
    smoothed: np.ndarray = field(init=False)
    """Float64 [n]."""

    def __post_init__(self) -> None:
        smoothing = Smoothing(self.steps)
        self.smoothed = np.array([smoothing.add(loss) for loss in self.losses])

    @classmethod
    def of(cls, rates: tuple[float, ...], losses: tuple[float, ...]) -> "Curve":
        """Build the curve of a sweep: a loss per step, of which the last may not be finite."""
        is_finite = not losses or math.isfinite(losses[-1])
        kept = np.array(losses if is_finite else losses[:-1], dtype=np.float64)
        curve = cls(rates=np.array(rates[: len(kept)]), losses=kept, steps=len(rates), end="done")
        if not is_finite:
            curve.end = "not finite"
        elif len(kept) and has_diverged(curve.smoothed[-1], curve.smoothed.min()):
            curve.end = "diverged"
        return curve

    @property
    def first(self) -> int:
        """The first step that counts."""
        return self.steps // SKIPPED

    @property
    def is_readable(self) -> bool:
        """Whether there are enough points for a slope."""
        return len(self.losses) >= self.first + 3

    @property
    def lowest(self) -> int:
        return self.first + int(np.argmin(self.smoothed[self.first :]))

    @property
    def noise(self) -> float:
        """Standard deviation of a loss, from the median change between neighbours (a divergence moves it little)."""
        return float(np.median(np.abs(np.diff(self.losses))) / (0.6745 * math.sqrt(2)))

    @property
    def start_loss(self) -> float:
        """The loss while rates are too small for an effect."""
        return float(np.median(self.losses[: max(self.first, 3)]))

    @property
    def steepest(self) -> int | None:
        """The step up to the lowest point where the smoothed loss falls fastest over log(rate); None for mere noise."""
        if not self.is_readable:
            return None
        descent = self.start_loss - self.smoothed[self.lowest]
        if not descent > max(NOISE * self.noise, LEAST_DESCENT * abs(self.start_loss)):
            return None
        width = max(1, self.steps // SLOPES)
        slope = np.convolve(np.gradient(self.smoothed, np.log(self.rates)), np.ones(width) / width, "same")
        return self.first + int(np.argmin(slope[self.first : self.lowest + 1]))
