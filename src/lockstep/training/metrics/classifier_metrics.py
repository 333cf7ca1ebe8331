"""Metrics of every classifier: accuracy, macro F1 and the confusion matrix.

Bit for bit equal to torchmetrics' MulticlassAccuracy (micro) and MulticlassF1Score (macro), whose import would take
every process seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CONFUSION = "confusion"


@dataclass(frozen=True)
class ClassifierMetric:
    """A function of the confusion matrix, int64 [classes, classes], rows: labels, columns: predictions."""

    classes: int
    compute: Callable[[Tensor], Tensor]

    def confusion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Count logits [m, classes, ...] against labels [m, ...]; the result is on the CPU."""
        cells = label.flatten() * self.classes + logits.argmax(dim=1).flatten()
        return torch.bincount(cells.cpu(), minlength=self.classes**2).reshape(self.classes, self.classes)


def accuracy(confusion: Tensor) -> Tensor:
    """Share of correct predictions, fp32."""
    return _divided(confusion.diagonal().sum(), confusion.sum())


def macro_f1(confusion: Tensor) -> Tensor:
    """Mean F1 over the classes, fp32, without those that have neither labels nor predictions."""
    true_positives = confusion.diagonal()
    false_positives, false_negatives = confusion.sum(0) - true_positives, confusion.sum(1) - true_positives
    weights = (true_positives + false_positives + false_negatives > 0).float()
    f1 = _divided(2.0 * true_positives, 2.0 * true_positives + false_negatives + false_positives)
    return _divided(weights * f1, weights.sum()).sum()


def classifier_metrics(classes: int) -> dict[str, ClassifierMetric]:
    """Return the metrics by name; none for fewer than two classes."""
    if classes < 2:
        return {}
    functions: dict[str, Callable[[Tensor], Tensor]]
    functions = {"accuracy": accuracy, "f1": macro_f1, CONFUSION: lambda confusion: confusion}
    return {name: ClassifierMetric(classes, compute) for name, compute in functions.items()}


def _divided(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Divide; 0 where the divisor is 0."""
    return torch.where(divisor != 0, dividend.float() / divisor.float(), 0.0)
