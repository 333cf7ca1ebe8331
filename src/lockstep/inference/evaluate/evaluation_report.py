"""The contents of an evaluation's report: classes, confidences, and the samples with the highest loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.base.contracts import DataSpec, Source
from lockstep.base.errors import ModelError
from lockstep.data.text_tokenizers import TextTokenizer
from lockstep.inference.evaluate.calibration import ece, reliability
from lockstep.inference.evaluate.evaluation_samples import readable
from lockstep.models.objectives._objective import PredictingObjective, Rows
from lockstep.training.evaluation import Predictions

LONGEST_TEXT = 2000
"""Maximum number of characters shown of a text."""


@dataclass(frozen=True, kw_only=True)
class HighLossSample:
    index: int
    origin: str
    label: str
    predicted: str
    confidence: float | None
    """Probability of the prediction; None where the objective gives none."""
    loss: float
    columns: dict[str, Any]
    """Columns of the source, in readable form."""

    @property
    def is_right(self) -> bool:
        """Whether the prediction is correct, which a high loss does not exclude."""
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
    rows = [number for number, row in enumerate(predictions.outputs) if not torch.isfinite(row).all()]
    if rows:
        raise ModelError(
            f"the model's outputs are not finite for {len(rows)} of {len(source)} samples, the first of them "
            f"{readable(source, rows[0])[0]}: evaluate an earlier checkpoint"
        )


def by_class(fits: Tensor, targets: Rows, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall, F1 and the number of samples, or of words, of each class."""
    from sklearn.metrics import precision_recall_fscore_support

    targets = targets if isinstance(targets, Tensor) else torch.cat(targets)
    columns = precision_recall_fscore_support(
        targets.long().numpy(), fits.numpy(), labels=range(len(names)), zero_division=0
    )
    return [
        {"label": name, "precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
        for name, p, r, f, n in zip(names, *columns, strict=True)
    ]


def confidences(predictions: Predictions, temperature: float) -> dict[str, Any]:
    """Return calibration error and reliability diagram at a temperature."""
    confidence, predicted = (predictions.outputs / temperature).softmax(-1).max(1)
    return {
        "ece": ece(predictions.outputs, predictions.targets, temperature),
        "temperature": temperature,
        "reliability": reliability(confidence, predicted == predictions.targets),
    }


def worst(
    predictions: Predictions,
    source: Source,
    spec: DataSpec,
    *,
    objective: PredictingObjective,
    count: int,
    temperature: float,
) -> list[HighLossSample]:
    """Return the samples with the highest loss, in descending order; equal ones in the order of the samples."""
    losses = objective.losses(predictions.outputs, predictions.targets, temperature)
    samples = []
    for row in losses.sort(descending=True, stable=True).indices[:count].tolist():
        origin, columns = readable(source, row)
        scores = objective.scores(predictions.outputs[row][None].double(), temperature)[0]
        predicted, confidence = objective.predicted(scores, spec)
        samples.append(
            HighLossSample(
                index=row,
                origin=origin,
                label=objective.target(predictions.targets[row], spec),
                predicted=predicted,
                confidence=confidence,
                loss=float(losses[row]) + 0.0,  # a perfect loss is -0.0
                columns=columns,
            )
        )
    return samples


def worst_texts(
    predictions: Predictions, source: Source, tokenizer: TextTokenizer, *, count: int
) -> list[HighLossSample]:
    """Return the samples of a language model with the highest mean loss of their tokens, in descending order. Label
    and prediction are those of the token with the highest loss."""
    samples = []
    for row in predictions.outputs[:, 0].sort(descending=True, stable=True).indices[:count].tolist():
        loss, token, likeliest, probability = predictions.outputs[row].tolist()
        origin, columns = readable(source, row)
        samples.append(
            HighLossSample(
                index=row,
                origin=origin,
                label=repr(tokenizer.decode([int(token)])),
                predicted=repr(tokenizer.decode([int(likeliest)])),
                confidence=probability,
                loss=loss,
                columns={"text": tokenizer.decode([int(each) for each in columns["input_ids"]])},
            )
        )
    return samples
