"""Interface of objectives: what a model learns to predict.

m = samples in a micro-batch, K = outputs of a sample, such as classes. `objectives/NAME.py` defines METRICS, and
`_NAME.py` defines `build() -> Objective`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Outputs
from lockstep.core.modules.outputs import logits_of
from lockstep.core.numerics.word_tokens import IGNORED
from lockstep.models.metrics.declared_metrics import DeclaredMetric

LABEL = "label"
"""Name of the column that is predicted."""
Rows = Any
"""One row for each sample: a tensor [m, ...], or a list of m tensors of different lengths."""


class Objective(ABC):
    """The loss and the metrics of a model."""

    smoothing: float = 0.0
    """Part of a target's weight that is spread over all classes in training (C. Szegedy et al., Rethinking the
    Inception Architecture, 2016)."""
    class_weights: Tensor | None = None
    """Weights of the classes, [K]: the weighted mean of torch's cross_entropy is minimised in training."""
    SMOOTHS: ClassVar[bool] = False
    """Whether `smoothing` and `class_weights` may be set: targets are classes."""

    TARGETS: ClassVar[tuple[str, ...]] = (LABEL,)
    """Columns that are no inputs of a model."""
    GENERATES: ClassVar[bool] = False
    """Whether its models complete texts."""
    PURPOSE: ClassVar[str] = ""
    """Purpose of a model, as "that ..." in its model card: of {count} {names}, from {samples}."""
    TASK: ClassVar[str] = ""
    """Name of the task on the Hugging Face hub, if the objective alone decides it."""
    WORDS: ClassVar[bool] = False
    """Whether a sample is a text of words with a target and a prediction for each: its tokens are marked
    (core.numerics.word_tokens), and its scores are [W, K] for W words."""

    NEEDS: ClassVar[str] = ""
    """Text on what the data has to have for it."""

    def is_taught_by(self, spec: DataSpec) -> bool:
        """Return whether the data has what it needs."""
        return True

    def outside(self, batch: Batch) -> tuple[int, str] | None:
        """Find the first sample of a micro-batch whose target the model cannot give -> its place, and what is wrong."""
        return None

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Sum the losses of a micro-batch. Raises ModelError for outputs of another shape than the targets."""

    def metrics(self, spec: DataSpec) -> dict[str, DeclaredMetric]:
        """Return the metrics of an evaluation by name."""
        return {}

    @property
    def is_weighted(self) -> bool:
        """Whether classes have weights: where gradients are wanted, so not in evaluations."""
        return self.class_weights is not None and torch.is_grad_enabled()

    def cross_entropy(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over all targets that are not IGNORED, and their number, or the sum of their weights; smoothed
        and weighted where gradients are wanted, so not in evaluations."""
        smoothing, weights = (self.smoothing if torch.is_grad_enabled() else 0.0), None
        counts = target != IGNORED
        if self.class_weights is not None and self.is_weighted:
            weights = self.class_weights.to(logits.dtype)
            counts = weights[target.clamp_min(0)] * counts
        total = F.cross_entropy(
            logits, target, weights, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )
        return total, counts.sum()

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Derive figures from the means over a whole split ("loss" and LossSum.sums)."""
        return {}

    def rows(self, outputs: Outputs, batch: Batch, spec: DataSpec) -> tuple[Rows, Rows] | None:
        """Return outputs [m, K] and targets [m] or [m, K] for the report of an evaluation; None without such a pair."""
        return None


class PredictingObjective(Objective):
    """One prediction for each sample, made from K numbers."""

    Answer: ClassVar[type[BaseModel]]
    """A prediction as JSON."""
    WHAT: ClassVar[str]
    """A prediction in words, such as "which class fits"."""
    CALIBRATES: ClassVar[bool] = False
    """Whether predictions are probabilities of classes that exclude each other, which a temperature can calibrate."""
    JOINED: ClassVar[str] = ""
    """Separator of the labels of a sample in a text; empty where a sample has one, or none."""

    def width(self, spec: DataSpec) -> int:
        """Return K, the number of outputs for each sample, by default one for each class."""
        return len(spec.labels)

    def is_taught_by(self, spec: DataSpec) -> bool:
        return self.width(spec) > 0

    def raw(self, outputs: Outputs, spec: DataSpec) -> Tensor:
        """Return a model's outputs, float32 [m, K], on the CPU. Raises ModelError for outputs of another shape."""
        found = logits_of(outputs)
        if found is not None and found.ndim == 1 and self.width(spec) == 1:
            found = found[:, None]
        if found is None or found.ndim != 2:
            raise ModelError(
                f"the model gives no outputs [samples, {self.width(spec)}], which tell {self.WHAT}: return them as one "
                "tensor, or as `logits` among several"
            )
        if found.shape[1] != self.width(spec):
            raise ModelError(
                f"the model gives outputs {list(found.shape)} for {len(found)} samples, where the data needs "
                f"[{len(found)}, {self.width(spec)}]: its head is of other data"
            )
        return found.detach().float().cpu()

    def rows(self, outputs: Outputs, batch: Batch, spec: DataSpec) -> tuple[Rows, Rows] | None:
        try:
            raw, target = self.raw(outputs, spec), batch.get(LABEL)
        except ModelError:
            return None
        if target is None or len(target) != len(raw):
            return None
        return raw, target.detach().cpu()

    def scores(self, raw: Tensor, temperature: float) -> Tensor:
        """Return probabilities or other numbers that a prediction consists of, [m, K]."""
        return raw

    def blank(self, count: int, spec: DataSpec) -> np.ndarray:
        """Allocate an array for the scores of `count` samples."""
        return np.empty((count, self.width(spec)), dtype=np.float32)

    def of_samples(self, scores: np.ndarray, samples: Sequence[np.ndarray]) -> np.ndarray:
        """Return the scores of each sample without padding: [m, K], or an object array [m] of arrays [W, K]."""
        return scores

    @abstractmethod
    def losses(self, raw: Rows, target: Rows, temperature: float) -> Tensor:
        """Compute the loss of each sample, float64 [m]."""

    def fits(self, raw: Rows) -> Tensor | None:
        """Return the predicted classes: their indices, or 0 and 1 [m, K]; None without classes."""
        return None

    @abstractmethod
    def answer(self, scores: np.ndarray, spec: DataSpec, text: str) -> dict[str, Any]:
        """Return a sample's prediction for its scores [K], as a dict for `Answer`; `text` is the input, empty for an
        image."""

    @abstractmethod
    def columns(
        self, scores: np.ndarray, spec: DataSpec, *, texts: Sequence[str], every: bool
    ) -> dict[str, np.ndarray]:
        """Return columns of a table for scores [n, K] of texts, or of images by their paths; with `every` also the
        probability of each class. Several labels of a sample are a list."""

    @abstractmethod
    def target(self, target: Tensor, spec: DataSpec) -> str:
        """Describe the target of a sample in words."""

    @abstractmethod
    def predicted(self, scores: Tensor, spec: DataSpec) -> tuple[str, float | None]:
        """Describe the prediction for the scores [K] of a sample in words -> the text, and the model's confidence."""


def described(number: float) -> str:
    return f"{number:.6g}"


def finite(scores: np.ndarray) -> np.ndarray:
    """Return which samples have finite scores only, bool [n]."""
    return np.array([np.isfinite(row).all() for row in scores], dtype=bool)


def target_of(batch: Batch, needs: str) -> Tensor:
    """Return the column that is predicted. Raises ModelError where there is none."""
    if LABEL not in batch:
        raise ModelError(
            f"the data has no column {LABEL!r} with {needs} to learn (there is: {', '.join(sorted(batch))}): give it, "
            "or write loss(outputs, batch) in the model's file"
        )
    return batch[LABEL]
