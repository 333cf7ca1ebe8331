"""Any number of classes for each sample: binary cross-entropy, exact matches, F1.

m = samples in a micro-batch, K = classes. Logits are float [m, K]; labels [m, K] are 1 for the classes of a sample.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Outputs
from lockstep.core.modules.outputs import logits_of
from lockstep.models.metrics.declared_metrics import Compute, DeclaredMetric, summed_metrics
from lockstep.models.objectives._answers import ClassesAnswer
from lockstep.models.objectives._objective import PredictingObjective, target_of

LEAST = 0.5
"""Probability above which a class fits."""


class Multilabel(PredictingObjective):
    Answer = ClassesAnswer
    NEEDS = "classes"
    WHAT = "which of its labels fit"
    JOINED = ";"
    PURPOSE = "that says which of {count} labels fit {samples}: {names}"

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Sum the binary cross-entropy; it counts classes of samples, so that the mean is that of BCEWithLogitsLoss."""
        logits, target = _pair(outputs, batch)
        total = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="sum")
        return LossSum(total, logits.numel())

    def metrics(self, spec: DataSpec) -> dict[str, DeclaredMetric]:
        computed: dict[str, Compute] = {
            "exact_match": lambda counts: counts[-1, 0] / counts[-1, 1],
            "f1": lambda counts: _f1(counts[:-1]).mean(),  # macro; 0 for classes that are neither there nor predicted
            "f1_micro": lambda counts: _f1(counts[:-1].sum(0)),
        }
        return summed_metrics(_counts, computed, _pair)

    def scores(self, raw: Tensor, temperature: float) -> Tensor:
        return raw.sigmoid()

    def losses(self, raw: Tensor, target: Tensor, temperature: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(raw.double(), target.double(), reduction="none").mean(1)

    def fits(self, raw: Tensor) -> Tensor:
        return (raw.sigmoid() > LEAST).long()

    def answer(self, scores: np.ndarray, spec: DataSpec, text: str) -> dict[str, Any]:
        return {
            "labels": self._fitting(scores, spec),
            "probabilities": dict(zip(spec.labels, map(float, scores), strict=True)),
        }

    def columns(
        self, scores: np.ndarray, spec: DataSpec, *, texts: Sequence[str], every: bool
    ) -> dict[str, np.ndarray]:
        labels = (self._fitting(row, spec) for row in scores)
        found = {"labels": np.fromiter(labels, dtype=object, count=len(scores))}
        return found | {f"probability_{x}": scores[:, i] for i, x in enumerate(spec.labels)} if every else found

    def _fitting(self, scores: np.ndarray, spec: DataSpec) -> list[str]:
        return [label for label, score in zip(spec.labels, scores, strict=True) if score > LEAST]

    def target(self, target: Tensor, spec: DataSpec) -> str:
        return _joined(target > 0, spec)

    def predicted(self, scores: Tensor, spec: DataSpec) -> tuple[str, float | None]:
        return _joined(scores > LEAST, spec), None


def _joined(fits: Tensor, spec: DataSpec) -> str:
    return ", ".join(label for label, one in zip(spec.labels, fits.tolist(), strict=True) if one) or "none"


def _pair(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits and labels [m, K]. Raises ModelError for other shapes."""
    logits, target = logits_of(outputs), target_of(batch, "a 0 or 1 for each class")
    if logits is None or logits.shape != target.shape or logits.ndim != 2:
        given = "nothing" if logits is None else str(list(logits.shape))
        raise ModelError(
            f"model.objective=multilabel takes outputs of the labels' shape {list(target.shape)} (samples, classes), "
            f"but the model gives {given}"
        )
    return logits, target


def _counts(logits: Tensor, target: Tensor) -> Tensor:
    """Return int64 [K + 1, 3]: per class true and false positives, false negatives; last exact matches, samples, 0."""
    fits, is_one = logits.float().sigmoid() > LEAST, target > 0
    counts = torch.stack([fits & is_one, fits & ~is_one, ~fits & is_one], dim=-1).sum(0)
    last = torch.tensor([[int((fits == is_one).all(1).sum()), len(fits), 0]])
    return torch.cat([counts, last])


def _f1(counts: Tensor) -> Tensor:
    positives, false_positives, false_negatives = counts.double().unbind(-1)
    total = 2 * positives + false_positives + false_negatives
    return torch.where(total > 0, 2 * positives / total, 0.0)


build = Multilabel
