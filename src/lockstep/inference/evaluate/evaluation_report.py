"""What is told of an evaluation: figures, classes, confidences, and the samples that the model is most wrong about."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.base.contracts import Source
from lockstep.base.errors import ModelError
from lockstep.inference.evaluate.calibration import ece, reliability
from lockstep.inference.evaluate.evaluation_samples import seen
from lockstep.training.evaluation import Predictions

LONGEST_TEXT = 2000
"""Characters of a text that are shown."""


@dataclass(frozen=True, kw_only=True)
class Misclassified:
    """A sample with a high loss."""

    index: int
    origin: str
    label: str
    predicted: str
    confidence: float
    loss: float
    columns: dict[str, Any]
    """Of the source: what a person can look at."""

    @property
    def is_right(self) -> bool:
        """Whether it got its label, if with little confidence."""
        return self.label == self.predicted

    @property
    def text(self) -> str:
        """It in words: its text, or the numbers of a user's own column."""
        if "text" in self.columns:
            words = str(self.columns["text"])
        else:
            shown = {name: value for name, value in self.columns.items() if name not in ("image", "label")}
            words = "; ".join(f"{name}: {value}" for name, value in shown.items())
        words = words if len(words) <= LONGEST_TEXT else f"{words[:LONGEST_TEXT]}…"
        return words.encode(errors="replace").decode()  # half of a surrogate pair could not be written


def check(predictions: Predictions, source: Source) -> None:
    """Raise ModelError where an output is not finite: nothing could be told of it."""
    rows = torch.nonzero(~torch.isfinite(predictions.logits).all(1)).flatten().tolist()
    if rows:
        raise ModelError(
            f"the model's outputs are not finite for {len(rows)} of {len(source)} samples, the first of them "
            f"{seen(source, rows[0])[0]}: evaluate an earlier checkpoint"
        )


def by_class(predictions: Predictions, names: Sequence[str]) -> list[dict[str, Any]]:
    """Precision, recall, F1 and the number of samples of each class."""
    from sklearn.metrics import precision_recall_fscore_support

    columns = precision_recall_fscore_support(
        predictions.labels.numpy(),
        predictions.logits.argmax(1).numpy(),
        labels=range(len(names)),
        zero_division=0,
    )
    return [
        {"label": name, "precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
        for name, p, r, f, n in zip(names, *columns, strict=True)
    ]


def confidences(predictions: Predictions, temperature: float) -> dict[str, Any]:
    """How far they can be believed."""
    confidence, predicted = (predictions.logits / temperature).softmax(-1).max(1)
    return {
        "ece": ece(predictions.logits, predictions.labels, temperature),
        "temperature": temperature,
        "reliability": reliability(confidence, predicted == predictions.labels),
    }


def worst(
    predictions: Predictions, source: Source, names: Sequence[str], *, count: int, temperature: float
) -> list[Misclassified]:
    """The samples with the highest cross-entropy, the highest first; of equals, the first first."""
    logits = predictions.logits.double() / temperature
    losses = F.cross_entropy(logits, predictions.labels, reduction="none")
    confidence, predicted = logits.softmax(-1).max(1)
    found = []
    for row in losses.sort(descending=True, stable=True).indices[:count].tolist():
        origin, columns = seen(source, row)
        found.append(
            Misclassified(
                index=row,
                origin=origin,
                label=names[int(predictions.labels[row])],
                predicted=names[int(predicted[row])],
                confidence=float(confidence[row]),
                loss=float(losses[row]) + 0.0,  # the best loss there is would be -0
                columns=columns,
            )
        )
    return found
