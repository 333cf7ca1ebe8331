"""The global gradient norm, from per-row sums of squares in a fixed order: the same bits however rows are held."""

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients there are, in the parameters' order."""
    return [p.grad for p in parameters if p.grad is not None]


def row_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each row of each gradient, flat [total rows]; a gradient without axes is one row."""
    rows = [g.square().contiguous().view(g.size(0) if g.ndim else 1, -1).sum(1) for g in grads if g.numel()]
    return torch.cat(rows)


def clip_(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place by max_norm / norm where the norm is larger."""
    torch._foreach_mul_(list(grads), (max_norm / (norm + EPSILON)).clamp(max=1.0))
