"""One class for each sample: cross-entropy, accuracy, F1, probabilities.

m = samples in a micro-batch, K = classes. Logits are float [m, K] or [m, K, T], labels int64 [m] or [m, T].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, Outputs
from lockstep.core.modules.outputs import logits_of
from lockstep.core.numerics.word_tokens import IGNORED
from lockstep.models.metrics.classifier_metrics import classifier_metrics
from lockstep.models.metrics.declared_metrics import DeclaredMetric
from lockstep.models.objectives._answers import ClassAnswer
from lockstep.models.objectives._objective import LABEL, PredictingObjective, target_of


class Classification(PredictingObjective):
    Answer = ClassAnswer
    NEEDS = "a class for each sample"
    WHAT = "which of its labels fits"
    PURPOSE = "that tells {count} classes of {samples} apart: {names}"
    CALIBRATES = True
    SMOOTHS = True
    classes: int | None = None
    """Number of classes that the model gives; known from its first outputs."""

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        label, logits = target_of(batch, "classes"), logits_of(outputs)
        if logits is None or logits.ndim < 2:
            what = "several, with none named logits" if logits is None else f"{list(logits.shape)}"
            raise ModelError(
                f"the loss of classes takes outputs [samples, classes], and the model gives {what}: return them as one "
                "tensor, or as `logits` among several, or write loss(outputs, batch) in the model's file"
            )
        label = class_indices(label, logits)
        if self.classes is None:
            self.classes = logits.shape[1]
            self.refuse_outside(batch)  # later ones are looked at before they are on a GPU, which would wait
        try:
            total, count = self.cross_entropy(logits, label)
        except IndexError:  # on a CPU
            self.refuse_outside(batch)
            raise
        return LossSum(total, count, {} if self.is_weighted else {"accuracy": (logits.argmax(1) == label).sum()})

    def refuse_outside(self, batch: Batch) -> None:
        if wrong := self.outside(batch):
            raise DataError(wrong[1])

    def outside(self, batch: Batch) -> tuple[int, str] | None:
        label = batch.get(LABEL)
        if label is None or self.classes is None:
            return None
        label = label.long()  # torch compares no uint16
        if not (is_wrong := (label >= self.classes) | (label < 0) & (label != IGNORED)).any():
            return None
        return int(is_wrong.nonzero()[0, 0]), (
            f"the column {LABEL!r} holds {int(label[is_wrong][0])}, but the model gives {self.classes} classes, whose "
            f"indices are 0 to {self.classes - 1} ({IGNORED}: this sample does not count)"
        )

    def metrics(self, spec: DataSpec) -> dict[str, DeclaredMetric]:
        classes = len(spec.labels)

        def arguments(outputs: Outputs, batch: Batch) -> Any:
            pair = classified(outputs, batch, classes)
            return pair and (pair[0].argmax(1), pair[1])

        return classifier_metrics(classes, arguments)

    def rows(self, outputs: Outputs, batch: Batch, spec: DataSpec) -> tuple[Tensor, Tensor] | None:
        pair = classified(outputs, batch, len(spec.labels)) if len(spec.labels) > 1 else None
        if pair is None or pair[1].ndim != 1 or bool((pair[1] < 0).any()):
            return None
        return pair[0].float().cpu(), pair[1].cpu()

    def scores(self, raw: Tensor, temperature: float) -> Tensor:
        return (raw / temperature).softmax(-1)

    def losses(self, raw: Tensor, target: Tensor, temperature: float) -> Tensor:
        return F.cross_entropy(raw.double() / temperature, target, reduction="none")

    def fits(self, raw: Tensor) -> Tensor:
        return raw.argmax(1)

    def answer(self, scores: np.ndarray, spec: DataSpec, text: str) -> dict[str, Any]:
        best = int(scores.argmax())
        return {
            "label": spec.labels[best],
            "confidence": float(scores[best]),
            "probabilities": dict(zip(spec.labels, map(float, scores), strict=True)),
        }

    def columns(
        self, scores: np.ndarray, spec: DataSpec, *, texts: Sequence[str], every: bool
    ) -> dict[str, np.ndarray]:
        names = np.array(spec.labels, dtype=object)
        found = {"label": names[scores.argmax(axis=1)], "confidence": scores.max(axis=1)}
        return found | {f"probability_{x}": scores[:, i] for i, x in enumerate(spec.labels)} if every else found

    def target(self, target: Tensor, spec: DataSpec) -> str:
        return spec.labels[int(target)]

    def predicted(self, scores: Tensor, spec: DataSpec) -> tuple[str, float | None]:
        best = int(scores.argmax())
        return spec.labels[best], float(scores[best])


def class_indices(label: Tensor, logits: Tensor) -> Tensor:
    """Return labels as int64. Raises DataError where they are no whole numbers, one for each of logits [m, K, ...]."""
    shape = [len(logits), *logits.shape[2:]]
    if label.is_floating_point() or list(label.shape) != shape:
        raise DataError(
            f"the column {LABEL!r} is {str(label.dtype).removeprefix('torch.')} of shape {list(label.shape)}, where "
            f"outputs {list(logits.shape)} need whole numbers {shape}, the index of the class of each sample. "
            "Give [:, 0] of a column, argmax(1) of one-hot rows, astype(int) of classes as floats; or choose "
            "model.objective=regression or multilabel"
        )
    return label.long()


def classified(outputs: Outputs, batch: Batch, classes: int) -> tuple[Tensor, Tensor] | None:
    """Return logits [m, classes, ...] and integer labels [m, ...]; None if outputs and labels have no such shapes."""
    logits, label = logits_of(outputs), batch.get(LABEL)
    if logits is None or label is None or label.is_floating_point() or logits.ndim < 2:
        return None
    matches = logits.shape[1] == classes and (len(logits), *logits.shape[2:]) == tuple(label.shape)
    return (logits, label.long()) if matches else None


build = Classification
