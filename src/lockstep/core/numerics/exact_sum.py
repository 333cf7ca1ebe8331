"""Sums of numbers without rounding, so that neither their order nor their distribution over processes matters."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

UNIT = 1 << 1074
"""Every float64 is a whole number of 1/UNIT."""


@dataclass(frozen=True, kw_only=True)
class ExactSum:
    units: int = 0
    """Sum of the finite numbers, in 1/UNIT."""
    beyond: float = 0.0
    """Sum of the infinite numbers and NaNs."""
    is_whole: bool = True

    def __add__(self, other: "ExactSum") -> "ExactSum":
        is_whole = self.is_whole and other.is_whole
        return ExactSum(units=self.units + other.units, beyond=self.beyond + other.beyond, is_whole=is_whole)

    @property
    def value(self) -> float | int:
        """An int where all were whole numbers; else the float nearest to the sum."""
        if self.beyond != 0:
            return self.beyond
        return self.units // UNIT if self.is_whole else float(Fraction(self.units, UNIT))


def exact_sum(values: Any) -> ExactSum:
    """Add up a number, a tensor, an array, or several of these."""
    numbers = list(_numbers(values))
    floats = [number for number in numbers if isinstance(number, float)]
    finite = [number.as_integer_ratio() for number in floats if math.isfinite(number)]
    whole = sum(number for number in numbers if not isinstance(number, float))
    return ExactSum(
        units=whole * UNIT + sum(top * (UNIT // bottom) for top, bottom in finite),
        beyond=sum(number for number in floats if not math.isfinite(number)),
        is_whole=not floats,
    )


def _numbers(values: Any) -> Iterable[int | float]:
    """Yield the numbers in nested values. Raises TypeError for what is no number."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double() if values.is_floating_point() else values.detach().cpu()
        yield from values.reshape(-1).tolist()
    elif isinstance(values, np.ndarray | np.generic):
        yield from np.asarray(values).reshape(-1).tolist()
    elif isinstance(values, int | float):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _numbers(each)
    else:
        raise TypeError(f"a {type(values).__name__} is no number and no tensor of numbers")
