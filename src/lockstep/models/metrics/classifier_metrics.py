"""Metrics of every classifier: accuracy, macro F1 and the confusion matrix.

Bit for bit equal to torchmetrics' MulticlassAccuracy (micro) and MulticlassF1Score (macro).
"""

from functools import partial

import torch
from torch import Tensor

from lockstep.core.numerics.word_tokens import IGNORED
from lockstep.models.metrics.declared_metrics import CONFUSION, Arguments, Compute, DeclaredMetric, summed_metrics


def confusion(predicted: Tensor, label: Tensor, *, classes: int) -> Tensor:
    """Count predicted classes against labels, both int64 of one shape -> int64 [classes, classes], rows: labels,
    columns: predictions; without labels that are IGNORED."""
    cells = label * classes + predicted
    return torch.bincount(cells[label != IGNORED], minlength=classes**2).reshape(classes, classes)


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


def classifier_metrics(classes: int, arguments: Arguments) -> dict[str, DeclaredMetric]:
    """Return the metrics of predicted classes and labels by name; none for fewer than two classes."""
    if classes < 2:
        return {}
    computed: dict[str, Compute] = {"accuracy": accuracy, "f1": macro_f1, CONFUSION: lambda confusion: confusion}
    return summed_metrics(partial(confusion, classes=classes), computed, arguments)


def _divided(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Divide; 0 where the divisor is 0."""
    return torch.where(divisor != 0, dividend.float() / divisor.float(), 0.0)
