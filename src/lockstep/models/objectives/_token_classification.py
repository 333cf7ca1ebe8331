"""One class for each word of a text: cross-entropy, accuracy, F1 of classes and of entities.

m = samples in a micro-batch, T = tokens of a sample, C = classes, W = words of a sample that have a token. Logits are
float [m, T, C], labels int64 [m, T]; tokens that do not begin a word have the label IGNORED, and do not count.
"""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Outputs
from lockstep.core.modules.outputs import logits_of, widened
from lockstep.core.numerics.word_tokens import IGNORED, words_of
from lockstep.models.metrics.classifier_metrics import classifier_metrics
from lockstep.models.metrics.declared_metrics import DeclaredMetric, SummedMetric
from lockstep.models.objectives._answers import WordsAnswer
from lockstep.models.objectives._objective import PredictingObjective, target_of

OUTSIDE, BEGIN, INSIDE = "O", "B-", "I-"


def entity_f1(labels: Sequence[str]) -> SummedMetric | None:
    """Return the micro F1 of entities for predicted and true tags [m, T]; None for labels that are no tags of IOB2."""
    entities = [label for label in labels if label != OUTSIDE]
    if not entities or not all(label.startswith((BEGIN, INSIDE)) for label in entities):
        return None
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(label[len(BEGIN) :] for label in entities))}
    kind = torch.tensor([-1 if label == OUTSIDE else kinds[label[len(BEGIN) :]] for label in labels])
    begins = torch.tensor([label.startswith(BEGIN) for label in labels])
    return SummedMetric(partial(_counts, kind=kind, begins=begins), _f1)


def _counts(predicted: Tensor, tags: Tensor, *, kind: Tensor, begins: Tensor) -> Tensor:
    """Count entities that are found exactly, that are predicted, and that are there: int64 [3]."""
    is_word = tags != IGNORED
    text = is_word.nonzero()[:, 0]
    spans = [_spans(kind[words], begins[words], text) for words in (predicted[is_word], tags[is_word])]
    (guess, guess_kind), (true, true_kind) = spans
    found = (true >= 0) & (guess == true) & (guess_kind == true_kind)
    return torch.stack([found.sum(), (guess >= 0).sum(), (true >= 0).sum()])


def _spans(kind: Tensor, begins: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for a word that begins an entity, its last word, else -1; and the kinds of the words: int64 [N]."""
    is_inside = kind >= 0
    goes_on = torch.zeros_like(is_inside)
    goes_on[1:] = is_inside[1:] & (kind[1:] == kind[:-1]) & (text[1:] == text[:-1]) & ~begins[1:]
    is_last = is_inside.clone()
    is_last[:-1] &= ~goes_on[1:]
    last = torch.full_like(kind, -1)
    last[is_inside & ~goes_on] = is_last.nonzero()[:, 0]
    return last, kind


def _f1(counts: Tensor) -> Tensor:
    """Compute 2 * found / (predicted + there); 0 where there is neither."""
    return 2 * counts[0] / (counts[1] + counts[2]).clamp_min(1)


NO_TAG = "_"
"""Tag in a table of a word that the model does not reach."""


class TokenClassification(PredictingObjective):
    Answer = WordsAnswer
    NEEDS = "a class for each word, as data.labels=tags gives them"
    WHAT = "the class of each token"
    JOINED = " "
    PURPOSE = "that gives each word of {samples} one of {count} labels: {names}"
    TASK = "token-classification"
    WORDS = True
    SMOOTHS = True

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Sum the cross-entropy; it counts words, so that the mean is that over all words."""
        logits, label = _pair(outputs, batch)
        total, count = self.cross_entropy(logits.flatten(0, 1), label.flatten())
        return LossSum(total, count, {} if self.is_weighted else {"accuracy": (logits.argmax(-1) == label).sum()})

    def metrics(self, spec: DataSpec) -> dict[str, DeclaredMetric]:
        found = classifier_metrics(len(spec.labels), _tags)
        if (entities := entity_f1(spec.labels)) is not None:
            found["entity_f1"] = DeclaredMetric(metric=entities, arguments=_tags)
        return found

    def raw(self, outputs: Outputs, spec: DataSpec) -> Tensor:
        found = logits_of(outputs)
        if found is None or found.ndim != 3 or found.shape[-1] != len(spec.labels):
            given = "nothing" if found is None else str(list(found.shape))
            raise ModelError(
                f"the model gives {given} instead of [samples, tokens, {len(spec.labels)}], which tells {self.WHAT}: "
                "its head is of other data, or of another objective"
            )
        return found.detach().float().cpu()

    def rows(self, outputs: Outputs, batch: Batch, spec: DataSpec) -> tuple[Any, Any] | None:
        """Return the outputs [W, C] and the targets [W] of each sample's words."""
        try:
            raw, label = self.raw(outputs, spec), target_of(batch, "a class for each word").cpu()
        except ModelError:
            return None
        if raw.shape[:2] != label.shape:
            return None
        pairs = [(row[is_word], tags[is_word]) for row, tags, is_word in zip(raw, label, label != IGNORED, strict=True)]
        return [row for row, _ in pairs], [tags for _, tags in pairs]

    def blank(self, count: int, spec: DataSpec) -> np.ndarray:
        return np.empty(count, dtype=object)

    def of_samples(self, scores: np.ndarray, samples: Sequence[np.ndarray]) -> np.ndarray:
        rows = (row[: len(tokens)][tokens >= 0] for row, tokens in zip(scores, samples, strict=True))
        return np.fromiter(rows, dtype=object, count=len(samples))

    def scores(self, raw: Tensor, temperature: float) -> Tensor:
        return (raw / temperature).softmax(-1)

    def losses(self, raw: Any, target: Any, temperature: float) -> Tensor:
        """Compute the mean over the words of a sample; 0 for a sample without any."""
        losses = [
            F.cross_entropy(row.double() / temperature, tags, reduction="sum") / max(1, len(tags))
            for row, tags in zip(raw, target, strict=True)
        ]
        return torch.stack(losses)

    def fits(self, raw: Any) -> Tensor:
        return torch.cat([row.argmax(-1) for row in raw])

    def answer(self, scores: np.ndarray, spec: DataSpec, text: str) -> dict[str, Any]:
        best, words = scores.argmax(-1), words_of(text)
        labels = [spec.labels[number] for number in best]
        return {
            "tokens": [
                {"word": word, "label": label, "confidence": confidence}
                for word, label, confidence in zip_longest(words, labels, map(float, scores.max(-1)))
            ]
        }

    def columns(
        self, scores: np.ndarray, spec: DataSpec, *, texts: Sequence[str], every: bool
    ) -> dict[str, np.ndarray]:
        found = np.empty(len(texts), dtype=object)
        for number, (row, text) in enumerate(zip(scores, texts, strict=True)):
            labels = [spec.labels[best] for best in row.argmax(-1)]
            found[number] = labels + [NO_TAG] * (len(words_of(text)) - len(labels))
        return {"tags": found}

    def target(self, target: Tensor, spec: DataSpec) -> str:
        return " ".join(spec.labels[number] for number in target.tolist())

    def predicted(self, scores: Tensor, spec: DataSpec) -> tuple[str, float | None]:
        return self.target(scores.argmax(-1), spec), None


def _pair(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits [m, T, C] and labels [m, T]. Raises ModelError for other shapes."""
    logits, label = logits_of(widened(outputs)), target_of(batch, "a class for each token")
    if logits is None or logits.ndim != 3 or logits.shape[:2] != label.shape or label.is_floating_point():
        given = "nothing" if logits is None else str(list(logits.shape))
        raise ModelError(
            "model.objective=token_classification takes logits [samples, tokens, classes] and an integer for each "
            f"token, but the model gives {given}, and the data labels {list(label.shape)}"
        )
    return logits, label


def _tags(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return predicted classes and labels [m, T]."""
    logits, label = _pair(outputs, batch)
    return logits.argmax(-1), label


build = TokenClassification
