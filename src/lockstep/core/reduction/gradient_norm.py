"""The global gradient norm, from per-row sums of squares in a fixed order: the same bits however rows are held."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.distributed.collectives import add_disjoint

EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients there are, in the parameters' order."""
    return [p.grad for p in parameters if p.grad is not None]


def normalise_(grads: Sequence[Tensor], count: Tensor) -> None:
    """Divide gradients by a count, 0-dim, in place; a minus zero becomes zero, which is what a part of the model gets
    that no sample has used."""
    if grads and grads[0].device.type == "cpu":
        for grad in grads:
            grad.div_(count).add_(0.0)  # while it is in the cache
    else:
        torch._foreach_div_(list(grads), count)
        torch._foreach_add_(list(grads), 0.0)


def row_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each row of each gradient, flat [total rows]; a gradient without axes is one row."""
    rows = [g.square().contiguous().view(g.size(0) if g.ndim else 1, -1).sum(1) for g in grads if g.numel()]
    return torch.cat(rows)


def clip_(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place by max_norm / norm where the norm is larger."""
    torch._foreach_mul_(list(grads), (max_norm / (norm + EPSILON)).clamp(max=1.0))


class Rows:
    """The rows of all parameters of a model, in its order, of which each rank holds some.

    `whole`: name -> number of rows, of every parameter that is trained; `first`: name -> the first row that this rank
    holds, of those it does; `group`: the ranks that together hold each row once.
    """

    def __init__(
        self, whole: Mapping[str, int], first: Mapping[str, int], *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.first, self.group, self.device, self.total = dict(first), group, device, 0
        for name, rows in whole.items():
            if name in self.first:
                self.first[name] += self.total
            self.total += rows

    def clip(self, parts: Mapping[str, Tensor], max_norm: float | None) -> Tensor:
        """The global norm, 0-dim, from the gradients of this rank's parts, which are scaled down to max_norm."""
        held = {name: part.grad for name, part in parts.items() if part.grad is not None}
        grads = list(held.values())
        table = torch.zeros(self.total, device=self.device)
        for name, grad in held.items():
            if grad.numel():
                own = row_squares([grad])
                table[self.first[name] : self.first[name] + len(own)] = own
        if self.group.size() > 1:
            add_disjoint(table, self.group)
        norm = table.sum().sqrt()
        if max_norm is not None and grads:
            clip_(grads, norm, max_norm)
        return norm


class GradientPieces:
    """Parameters of which the ranks of a group hold pieces, cut along any axis, or all of them the whole.

    `split`: the names of those that are cut. A row may lie on several ranks, so the bits are not those of `Rows`; they
    are the same on every rank, and every number counts once.
    """

    def __init__(self, split: Collection[str], *, group: dist.ProcessGroup, device: torch.device) -> None:
        self.split, self.group, self.device = frozenset(split), group, device

    def clip(self, parts: Mapping[str, Tensor], max_norm: float | None) -> Tensor:
        """The global norm, 0-dim, from the gradients of this rank's parts, which are scaled down to max_norm."""
        held = {name: part.grad for name, part in parts.items() if part.grad is not None}
        place, table = self.group.rank(), torch.zeros(self.group.size(), len(held), device=self.device)
        for column, name in enumerate(held):
            is_counted = name in self.split or place == 0
            if is_counted and held[name].numel():
                table[place, column] = row_squares([held[name]]).sum()
        if self.group.size() > 1:
            add_disjoint(table, self.group)
        norm = table.sum().sqrt()
        if max_norm is not None and held:
            clip_(list(held.values()), norm, max_norm)
        return norm


def rows_of(parameter: Tensor) -> int:
    """How many rows a parameter has in the table; none where it is empty."""
    if not parameter.numel():
        return 0
    return parameter.size(0) if parameter.ndim else 1
