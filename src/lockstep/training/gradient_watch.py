"""Trained parameters that the loss does not reach, as the optimizer's first steps show."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.core.modules.dtensors import local_tensor
from lockstep.training.optim import SeveralOptimizers

STEPS = 5
"""Number of steps watched: where layers begin at zero, those below them have no gradient in the first two or three."""


class GradientWatch:
    """Records which parameters have a nonzero gradient when the optimizer runs; on a GPU nothing waits for it."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.sums: dict[Tensor, Tensor] = {}
        """Sum of the magnitudes of each parameter's gradients."""
        self.num_steps = 0
        parts = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else [optimizer]
        self.handles = [part.register_step_pre_hook(self._add) for part in parts]
        self.last_part = parts[-1]

    def _add(self, optimizer: Optimizer, *_: Any) -> None:
        members = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        sizes = torch._foreach_norm([local_tensor(p.grad).detach() for p in members], 1) if members else ()
        for p, size in zip(members, sizes, strict=True):
            self.sums[p] = self.sums[p] + size if p in self.sums else size
        self.num_steps += optimizer is self.last_part

    def finish(self) -> Collection[str]:
        """Remove the hooks -> this rank's parameters whose gradients were all 0; none where a step had no update."""
        while self.handles:
            self.handles.pop().remove()
        if self.num_steps < STEPS:
            return ()
        return {name for p, name in self.names.items() if p not in self.sums or float(self.sums[p]) == 0}
