"""Whether a loss is a sum over samples: that of a micro-batch is then the sum of those of its halves.

m = samples of the micro-batch.
"""

import random
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.base.model_contracts import Batch, LossSum
from lockstep.core.modules.module_trace import fingerprint
from lockstep.training.finding_messages import mixing_loss
from lockstep.training.findings import Finding

LossIs = Literal["sample_wise", "batch_wise"]
NEAR = 0.05
"""Relative: so near to the mean of its halves' it is taken for a mean."""
TOLERANCE = 1e-3
"""Relative, for sums of a few thousand numbers of fp32; a mean is off by half of it all."""


def loss_findings(
    loss: Callable[[Any, Batch], LossSum],
    outputs: Any,
    batch: Batch,
    *,
    seed: Callable[[], None],
    loss_is: LossIs,
) -> list[Finding]:
    """What is wrong with a loss, if anything is: nothing where it is declared as batch_wise, draws random numbers, or
    where outputs and batch cannot be cut in two. `seed` seeds the generators."""
    sizes = {len(column) for column in batch.values() if isinstance(column, Tensor) and column.ndim}
    if loss_is == "batch_wise" or len(sizes) != 1 or (size := sizes.pop()) < 2:
        return []
    middle = size // 2
    parts = [cut(outputs, size, part) for part in (slice(None), slice(middle), slice(middle, None))]
    batches = [cut(batch, size, part) for part in (slice(None), slice(middle), slice(middle, None))]
    if any(part is None for part in (*parts, *batches)):
        return []
    values: list[tuple[float, float]] = []
    for outputs_part, batch_part in zip(parts, batches, strict=True):
        seed()
        before = _drawn()
        with torch.no_grad():
            found = loss(outputs_part, batch_part)
        if _drawn() != before:
            return []
        values.append((float(found.total), float(found.count)))
    return _judged(values, size)


def cut(value: Any, size: int, part: slice) -> Any:
    """Some samples of outputs or of a batch, copied; None where a tensor has not a sample in each row."""
    leaves, spec = pytree.tree_flatten(value)
    if not all(leaf.ndim and len(leaf) == size for leaf in leaves if isinstance(leaf, Tensor)):
        return None
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return pytree.tree_unflatten([leaf[part].clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _judged(values: list[tuple[float, float]], size: int) -> list[Finding]:
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
    return [mixing_loss(figures, is_mean=abs(total - mean) <= NEAR * scale)]


def _drawn() -> str:
    """Differs after a number was drawn."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return fingerprint([torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()])
