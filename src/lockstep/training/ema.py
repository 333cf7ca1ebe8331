"""An exponential moving average of the weights, used in their place for evaluation and export."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage:
    """average = decay * average + (1 - decay) * weights, after every step; buffers are not averaged.

    Source: B. Polyak, A. Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.weights = dict(module.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self.weights.items()}
        self._update = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """Add the current weights to the average."""
        self._update(list(self.average.values()), [p.detach() for p in self.weights.values()], None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the module; swap back afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for name, parameter in self.weights.items():
                weights = parameter.detach().clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(weights)
