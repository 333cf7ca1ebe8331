"""What is always measured of a classifier: accuracy, macro F1 and the confusion matrix, all from one count.

The figures are those of torchmetrics (MulticlassAccuracy, micro; MulticlassF1Score, macro), bit for bit; importing it
takes seconds, which every process of a run would spend.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CONFUSION = "confusion"


@dataclass(frozen=True)
class ClassifierMetric:
    """A figure that follows from the confusion matrix, int64 [classes, classes], rows: labels, columns: predictions."""

    classes: int
    compute: Callable[[Tensor], Tensor]

    def confusion(self, logits: Tensor, label: Tensor) -> Tensor:
        """Of logits [m, classes, ...] and labels [m, ...]; on the CPU."""
        cells = label.flatten() * self.classes + logits.argmax(dim=1).flatten()
        return torch.bincount(cells.cpu(), minlength=self.classes**2).reshape(self.classes, self.classes)


def accuracy(confusion: Tensor) -> Tensor:
    """The share of samples that were predicted right, fp32."""
    return _divided(confusion.diagonal().sum(), confusion.sum())


def macro_f1(confusion: Tensor) -> Tensor:
    """The mean over classes, fp32, without those that are neither there nor predicted."""
    right = confusion.diagonal()
    predicted_wrongly, missed = confusion.sum(0) - right, confusion.sum(1) - right
    weights = (right + predicted_wrongly + missed > 0).float()
    return _divided(weights * _divided(2.0 * right, 2.0 * right + missed + predicted_wrongly), weights.sum()).sum()


def classifier_metrics(classes: int) -> dict[str, ClassifierMetric]:
    """By name; none for fewer than two classes."""
    if classes < 2:
        return {}
    figures: dict[str, Callable[[Tensor], Tensor]]
    figures = {"accuracy": accuracy, "f1": macro_f1, CONFUSION: lambda confusion: confusion}
    return {name: ClassifierMetric(classes, compute) for name, compute in figures.items()}


def _divided(part: Tensor, whole: Tensor) -> Tensor:
    """0 where the whole is 0."""
    return torch.where(whole != 0, part.float() / whole.float(), 0.0)
