"""One or more numbers for each sample: squared error, MAE, RMSE, R2.

m = samples in a micro-batch, K = numbers of a sample. Outputs and labels are float [m, K], or [m] for one number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Outputs
from lockstep.core.modules.outputs import logits_of
from lockstep.models.metrics.declared_metrics import Compute, DeclaredMetric, summed_metrics
from lockstep.models.objectives._answers import NumbersAnswer
from lockstep.models.objectives._objective import PredictingObjective, described, target_of


class Regression(PredictingObjective):
    Answer = NumbersAnswer
    NEEDS = "numbers to predict, with names (DataSpec.numbers)"
    WHAT = "numbers"
    PURPOSE = "that predicts numbers from {samples}: {names}"

    def width(self, spec: DataSpec) -> int:
        return len(spec.numbers)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Sum the squared error; it counts numbers, so that the mean is that of MSELoss."""
        predicted, target = _pair(outputs, batch)
        error = predicted - target.to(predicted.dtype)
        return LossSum(error.square().sum(), error.numel())

    def metrics(self, spec: DataSpec) -> dict[str, DeclaredMetric]:
        computed: dict[str, Compute] = {
            "mae": lambda sums: (sums[1] / sums[0]).mean(),
            "rmse": lambda sums: (sums[2] / sums[0]).sqrt().mean(),  # of the roots, as root_mean_squared_error
            "r2": _r2,
        }
        return summed_metrics(_sums, computed, _pair)

    def rows(self, outputs: Outputs, batch: Batch, spec: DataSpec) -> tuple[Tensor, Tensor] | None:
        pair = super().rows(outputs, batch, spec)
        return None if pair is None else (pair[0], pair[1].float().reshape(pair[0].shape))

    def losses(self, raw: Tensor, target: Tensor, temperature: float) -> Tensor:
        return (raw.double() - target.double()).square().mean(1)

    def answer(self, scores: np.ndarray, spec: DataSpec, text: str) -> dict[str, Any]:
        return {"values": dict(zip(spec.numbers, map(float, scores), strict=True))}

    def columns(
        self, scores: np.ndarray, spec: DataSpec, *, texts: Sequence[str], every: bool
    ) -> dict[str, np.ndarray]:
        return {name: scores[:, number] for number, name in enumerate(spec.numbers)}

    def target(self, target: Tensor, spec: DataSpec) -> str:
        return ", ".join(map(described, target.flatten().tolist()))

    def predicted(self, scores: Tensor, spec: DataSpec) -> tuple[str, float | None]:
        return self.target(scores, spec), None


def _pair(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return outputs and labels [m, K]; [m] and [m, 1] are the same. Raises ModelError for other shapes."""
    predicted, target = logits_of(outputs), target_of(batch, "numbers")
    if predicted is not None and predicted.ndim <= 2 and target.ndim <= 2:
        rows = len(target)
        if predicted.numel() == target.numel() and len(predicted) == rows:
            return predicted.reshape(rows, -1), target.reshape(rows, -1)
    given = "nothing" if predicted is None else str(list(predicted.shape))
    raise ModelError(
        f"model.objective=regression takes outputs of the labels' shape {list(target.shape)}, but the model gives "
        f"{given}"
    )


def _sums(predicted: Tensor, target: Tensor) -> Tensor:
    """Return float64 [5, K]: samples, absolute and squared errors, targets and their squares."""
    predicted, target = predicted.double(), target.double()
    error = predicted - target
    rows = [torch.ones_like(target), error.abs(), error.square(), target, target.square()]
    return torch.stack([each.sum(0) for each in rows])


def _r2(sums: Tensor) -> Tensor:
    """Average over the numbers, as scikit-learn's r2_score: of a constant number 1 if all are right, else 0."""
    count, _, squared, total, squares = sums
    variation = (squares - total.square() / count).clamp_min(0)
    constant = torch.where(squared > 0, 0.0, 1.0).double()
    return torch.where(variation > 0, 1 - squared / variation, constant).mean()


build = Regression
