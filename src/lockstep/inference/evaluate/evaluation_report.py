"""The contents of an evaluation's report: classes, confidences, and the samples with the highest loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.base.contracts import Source
from lockstep.base.errors import ModelError
from lockstep.inference.evaluate.calibration import ece, reliability
from lockstep.inference.evaluate.evaluation_samples import readable
from lockstep.training.evaluation import Predictions

LONGEST_TEXT = 2000
"""Characters shown of a text."""


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
    """Of the source, in readable form."""

    @property
    def is_right(self) -> bool:
        """A correct prediction may have a high loss, too."""
        return self.label == self.predicted

    @property
    def text(self) -> str:
        """Its text, or the values of a user's own columns."""
        if "text" in self.columns:
            text = str(self.columns["text"])
        else:
            shown = {name: value for name, value in self.columns.items() if name not in ("image", "label")}
            text = "; ".join(f"{name}: {value}" for name, value in shown.items())
        text = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
        return text.encode(errors="replace").decode()  # half of a surrogate pair could not be written


def check(predictions: Predictions, source: Source) -> None:
    """Raise ModelError if an output is not finite."""
    rows = torch.nonzero(~torch.isfinite(predictions.logits).all(1)).flatten().tolist()
    if rows:
        raise ModelError(
            f"the model's outputs are not finite for {len(rows)} of {len(source)} samples, the first of them "
            f"{readable(source, rows[0])[0]}: evaluate an earlier checkpoint"
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
    """Calibration error and reliability diagram at a temperature."""
    confidence, predicted = (predictions.logits / temperature).softmax(-1).max(1)
    return {
        "ece": ece(predictions.logits, predictions.labels, temperature),
        "temperature": temperature,
        "reliability": reliability(confidence, predicted == predictions.labels),
    }


def worst(
    predictions: Predictions, source: Source, names: Sequence[str], *, count: int, temperature: float
) -> list[Misclassified]:
    """The samples with the highest cross-entropy, in descending order; equal ones in the order of the samples."""
    logits = predictions.logits.double() / temperature
    losses = F.cross_entropy(logits, predictions.labels, reduction="none")
    confidence, predicted = logits.softmax(-1).max(1)
    samples = []
    for row in losses.sort(descending=True, stable=True).indices[:count].tolist():
        origin, columns = readable(source, row)
        samples.append(
            Misclassified(
                index=row,
                origin=origin,
                label=names[int(predictions.labels[row])],
                predicted=names[int(predicted[row])],
                confidence=float(confidence[row]),
                loss=float(losses[row]) + 0.0,  # a perfect loss is -0.0
                columns=columns,
            )
        )
    return samples
