"""Check that a loss is a sum over samples: a micro-batch's loss is then the sum of the losses of its halves."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.base.model_contracts import Batch, LossSum
from lockstep.core.modules.module_trace import fingerprint
from lockstep.core.numerics.seeds import generators
from lockstep.training.findings import Finding, mixing_loss

LossIs = Literal["sample_wise", "batch_wise"]
MEAN_TOLERANCE = 0.05
"""Relative: a loss this close to the mean of the halves' losses is reported as a mean."""
TOLERANCE = 1e-3
"""Relative, for sums of a few thousand fp32 numbers; a mean is off by a factor of 2."""


def loss_findings(
    loss: Callable[[Any, Batch], LossSum], outputs: Any, batch: Batch, *, seed: Callable[[], None], loss_is: LossIs
) -> list[Finding]:
    """Check a loss; no findings if it is batch_wise, draws random numbers, or gets what cannot be split by samples."""
    sizes = {len(column) for column in batch.values() if isinstance(column, Tensor) and column.ndim}
    if loss_is == "batch_wise" or len(sizes) != 1 or (size := sizes.pop()) < 2:
        return []
    values: list[tuple[float, float]] = []
    for samples in (slice(None), slice(size // 2), slice(size // 2, None)):
        some_outputs, some_batch = _sliced(outputs, size, samples), _sliced(batch, size, samples)
        if some_outputs is None or some_batch is None:
            return []
        seed()
        before = generator_states()
        with torch.no_grad():
            result = loss(some_outputs, some_batch)
        if generator_states() != before:
            return []
        values.append((float(result.total), float(result.count)))
    return _compare(values, size)


def _sliced(value: Any, size: int, samples: slice) -> Any:
    """Copy some samples of outputs or of a batch; None if a tensor does not have one row per sample."""
    leaves, spec = pytree.tree_flatten(value)
    if not all(leaf.ndim and len(leaf) == size for leaf in leaves if isinstance(leaf, Tensor)):
        return None
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return pytree.tree_unflatten([leaf[samples].clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _compare(values: list[tuple[float, float]], size: int) -> list[Finding]:
    (total, count), *halves = values
    totals, counts = [value for value, _ in halves], [number for _, number in halves]
    scale = max(abs(total), *map(abs, totals))
    if not np.isfinite([total, count, *totals, *counts]).all():
        return []
    if abs(total - sum(totals)) <= TOLERANCE * scale and abs(count - sum(counts)) <= TOLERANCE * abs(count):
        return []
    mean = float(np.average(totals, weights=[size // 2, size - size // 2]))
    figures = (
        f"LossSum({total:.6g}, {count:g}) for {size} samples, but LossSum({totals[0]:.6g}, {counts[0]:g}) and "
        f"LossSum({totals[1]:.6g}, {counts[1]:g}) for their halves"
    )
    return [mixing_loss(figures, is_mean=abs(total - mean) <= MEAN_TOLERANCE * scale)]


def generator_states() -> str:
    """Return a digest that changes with each number drawn from torch's, NumPy's or Python's default generators."""
    return fingerprint(generators())
