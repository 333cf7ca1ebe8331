"""The global gradient norm, from sums of squares in a fixed order: the same bits however rows are sharded."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.distributed.collectives import DisjointSum

CACHED = 1 << 17
"""Elements that stay in a core's cache from one operation to the next."""
NO_ROWS: Mapping[Tensor, Tensor] = MappingProxyType({})
EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """List the gradients that are not None, in the parameters' order."""
    return [p.grad for p in parameters if p.grad is not None]


def average_(
    grads: Sequence[Tensor],
    norm: Tensor,
    *,
    count: Tensor,
    max_norm: float | None,
    max_value: float | None = None,
    touched_rows: Mapping[Tensor, Tensor] = NO_ROWS,
) -> Tensor:
    """Divide summed gradients by a count, 0-dim, scale them down to max_norm, and clamp them to max_value, in place.

    `norm`: of the sums, 0-dim; `touched_rows`: see Strategy. Returns the norm of the averages before clipping. Minus
    zero becomes zero, as in parameters that no sample used.
    """
    mean_norm = (norm / count).to(norm.dtype)
    factor = 1 / count
    if max_norm is not None:
        factor = factor * (max_norm / (mean_norm + EPSILON)).clamp(max=1.0)
    if grads:  # which may lie in the CPU's memory
        factor = factor.to(grads[0].device)
    for grad, rows in touched_rows.items():
        grad[rows] = _clamp(grad[rows].mul_(factor).add_(0.0), max_value)
    whole = [grad for grad in grads if grad not in touched_rows]
    if whole and whole[0].device.type == "cpu":
        for grad in whole:
            parts = grad.view(-1).split(CACHED) if grad.is_contiguous() else (grad,)
            for part in parts:
                _clamp(part.mul_(factor).add_(0.0), max_value)  # while it is in the cache
    else:
        _scale_together(whole, factor, max_value)
    return mean_norm


def _scale_together(grads: Sequence[Tensor], factor: Tensor, max_value: float | None) -> None:
    """Scale and clamp gradients in a few kernels, which need the factor in the dtype of all gradients."""
    for dtype in {grad.dtype for grad in grads}:
        alike = [grad for grad in grads if grad.dtype == dtype]
        torch._foreach_mul_(alike, factor.to(dtype))
        torch._foreach_add_(alike, 0.0)
        if max_value is not None:
            torch._foreach_clamp_min_(alike, -max_value)
            torch._foreach_clamp_max_(alike, max_value)


def _clamp(values: Tensor, largest: float | None) -> Tensor:
    return values if largest is None else values.clamp_(-largest, largest)


def row_squares(grads: Sequence[Tensor], touched_rows: Mapping[Tensor, Tensor] = NO_ROWS) -> Tensor:
    """Return the sum of squares of each row of each gradient, flat [total rows]; a 0-dim gradient is one row.
    `touched_rows`: see Strategy. In the widest dtype of all gradients, at least fp32."""
    return torch.cat([_row_norms(grad, touched_rows.get(grad)) for grad in grads if grad.numel()]).square()


def _row_norms(grad: Tensor, touched: Tensor | None = None) -> Tensor:
    dtype = _dtype_of([grad])
    if touched is None:
        rows = grad.contiguous().view(grad.size(0) if grad.ndim else 1, -1)
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    norms = grad.new_zeros(len(grad), dtype=dtype)
    norms[touched] = torch.linalg.vector_norm(grad[touched], dim=1, dtype=dtype)
    return norms


def _dtype_of(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the widest dtype of the tensors, at least fp32."""
    return reduce(torch.promote_types, (each.dtype for each in tensors if each.numel()), torch.float32)


class ShardedNorm(ABC):
    """The global norm of gradients that are sharded over the ranks of a group."""

    def __init__(self, trained: Mapping[str, Tensor], *, group: dist.ProcessGroup, device: torch.device) -> None:
        """`trained`: every trained parameter of the whole model, in its order, for shapes and dtypes."""
        self.group, self.device, self.dtype = group, device, _dtype_of(trained.values())

    @abstractmethod
    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return a table of sums of squares, of which each rank fills other elements and leaves the rest zero."""

    def global_norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Compute the global norm, 0-dim, from the gradients of each rank's parameters. A collective."""
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return DisjointSum(self.squares(grads), self.group).result().sum().sqrt()


class RowwiseNorm(ShardedNorm):
    """Norm of parameters that are sharded by whole rows: the bits of an unsharded model. `first_row`: the first row
    that this rank holds, for the parameters of which it holds any; the ranks of `group` together hold each row once."""

    def __init__(
        self,
        trained: Mapping[str, Tensor],
        first_row: Mapping[str, int],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(trained, group=group, device=device)
        self.offset, self.total = dict(first_row), 0
        for name, parameter in trained.items():
            if name in self.offset:
                self.offset[name] += self.total
            if parameter.numel():
                self.total += parameter.size(0) if parameter.ndim else 1

    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return a table [rows of all parameters]."""
        table = torch.zeros(self.total, device=self.device, dtype=self.dtype)
        for name, grad in grads.items():
            if grad.numel():
                rows = _row_norms(grad)
                table[self.offset[name] : self.offset[name] + len(rows)] = rows
        return table.square_()


class SplitNorm(ShardedNorm):
    """Norm of parameters that are split along any axis, or replicated on all ranks of the group.

    `split`: the names of the split ones. A row may lie on several ranks, so the bits are not those of `RowwiseNorm`;
    they are the same on every rank, and every element counts once.
    """

    def __init__(
        self, trained: Mapping[str, Tensor], split: Collection[str], *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(trained, group=group, device=device)
        self.split = frozenset(split)

    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return a table [ranks, parameters]."""
        rank = self.group.rank()
        table = torch.zeros(self.group.size(), len(grads), device=self.device, dtype=self.dtype)
        for column, (name, grad) in enumerate(grads.items()):
            if (name in self.split or rank == 0) and grad.numel():
                table[rank, column] = row_squares([grad]).sum()
        return table
