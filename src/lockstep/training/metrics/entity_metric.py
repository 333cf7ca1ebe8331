"""F1 of named entities: spans of words that have to be found exactly.

N = words of several texts, one after the other. Tags are those of IOB2: "B-X" begins an entity of kind X, "I-X" goes on
with it, "O" is outside. As in seqeval, an "I-X" that follows no X begins one.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.training.metrics.declared_metrics import SummedMetric

OUTSIDE, BEGIN, INSIDE = "O", "B-", "I-"


def entity_f1(labels: Sequence[str], *, ignored: int) -> SummedMetric | None:
    """The micro F1 of entities for logits [m, C, T] and tags [m, T]; None for labels that are no tags of IOB2."""
    entities = [label for label in labels if label != OUTSIDE]
    if not entities or not all(label.startswith((BEGIN, INSIDE)) for label in entities):
        return None
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(label[len(BEGIN) :] for label in entities))}
    kind = torch.tensor([-1 if label == OUTSIDE else kinds[label[len(BEGIN) :]] for label in labels])
    begins = torch.tensor([label.startswith(BEGIN) for label in labels])
    return SummedMetric(partial(_counts, kind=kind, begins=begins, ignored=ignored), _f1)


def _counts(logits: Tensor, tags: Tensor, *, kind: Tensor, begins: Tensor, ignored: int) -> Tensor:
    """int64 [3]: entities that are found exactly, that are predicted, and that are there."""
    predicted, tags = logits.detach().argmax(1).cpu(), tags.cpu()
    is_word = tags != ignored
    text = is_word.nonzero()[:, 0]
    spans = [_spans(kind[words], begins[words], text) for words in (predicted[is_word], tags[is_word])]
    (said, said_kind), (true, true_kind) = spans
    found = (true >= 0) & (said == true) & (said_kind == true_kind)
    return torch.stack([found.sum(), (said >= 0).sum(), (true >= 0).sum()])


def _spans(kind: Tensor, begins: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Where a word begins an entity, its last word, else -1; and the kinds of the words: int64 [N]."""
    is_inside = kind >= 0
    goes_on = torch.zeros_like(is_inside)
    goes_on[1:] = is_inside[1:] & (kind[1:] == kind[:-1]) & (text[1:] == text[:-1]) & ~begins[1:]
    is_last = is_inside.clone()
    is_last[:-1] &= ~goes_on[1:]
    last = torch.full_like(kind, -1)
    last[is_inside & ~goes_on] = is_last.nonzero()[:, 0]
    return last, kind


def _f1(counts: Tensor) -> Tensor:
    """2 * found / (predicted + there); 0 where there is neither."""
    return 2 * counts[0] / (counts[1] + counts[2]).clamp_min(1)
