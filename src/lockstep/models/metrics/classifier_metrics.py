"""Metrics of every classifier: accuracy, macro F1 and the confusion matrix.

Bit for bit equal to torchmetrics' MulticlassAccuracy (micro) and MulticlassF1Score (macro).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lockstep.models.metrics.declared_metrics import CONFUSION, SummedMetric


def confusion(predicted: Tensor, label: Tensor, *, classes: int, ignored: int | None = None) -> Tensor:
    """Count predicted classes against labels, both int64 of one shape -> int64 [classes, classes], rows: labels,
    columns: predictions; without labels that are `ignored`."""
    cells = label * classes + predicted
    cells = cells.flatten() if ignored is None else cells[label != ignored]
    return torch.bincount(cells, minlength=classes**2).reshape(classes, classes)


def accuracy(confusion: Tensor) -> Tensor:
    """Return the share of correct predictions, fp32."""
    return _divided(confusion.diagonal().sum(), confusion.sum())


def macro_f1(confusion: Tensor) -> Tensor:
    """Return the mean F1 over the classes, fp32, without those that have neither labels nor predictions."""
    true_positives = confusion.diagonal()
    false_positives, false_negatives = confusion.sum(0) - true_positives, confusion.sum(1) - true_positives
    weights = (true_positives + false_positives + false_negatives > 0).float()
    f1 = _divided(2.0 * true_positives, 2.0 * true_positives + false_negatives + false_positives)
    return _divided(weights * f1, weights.sum()).sum()


def classifier_metrics(classes: int, *, ignored: int | None = None) -> dict[str, SummedMetric]:
    """Return the metrics of predicted classes and labels by name; none for fewer than two classes."""
    if classes < 2:
        return {}
    functions: dict[str, Callable[[Tensor], Tensor]]
    functions = {"accuracy": accuracy, "f1": macro_f1, CONFUSION: lambda confusion: confusion}
    statistics = partial(confusion, classes=classes, ignored=ignored)
    return {name: SummedMetric(statistics, compute) for name, compute in functions.items()}


def _divided(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Divide; 0 where the divisor is 0."""
    return torch.where(divisor != 0, dividend.float() / divisor.float(), 0.0)
