"""Metrics that follow from a sum over samples, which processes can add up in any grouping."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SummedMetric:
    """A function of a sum of statistics over all samples.

    Much quicker to import than torchmetrics, which would cost every process two seconds.
    """

    statistics: Callable[..., Tensor]
    """(the metric's arguments) -> what a micro-batch adds, int64 or float64 of a constant shape, on the CPU."""
    compute: Callable[[Tensor], Any]
    """The sum -> the metric: a number, or a dict of numbers."""
