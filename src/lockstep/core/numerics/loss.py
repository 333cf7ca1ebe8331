"""Losses as sums, so that any split of a batch gives the same whole."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch
from lockstep.core.distributed.collectives import all_gather_object


def classification_loss(outputs: Tensor, batch: Batch) -> LossSum:
    """Cross-entropy of logits [m, classes] against batch["label"] [m], with the number that are right."""
    label = batch["label"]
    total = F.cross_entropy(outputs, label, reduction="sum")
    return LossSum(total, label.numel(), {"accuracy": (outputs.argmax(-1) == label).sum()})


EXAMPLE = 'LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), len(outputs))'


def checked(found: Any) -> LossSum:
    """What a user's loss has returned, as sums of one number each. Raises ModelError where it is something else."""
    if not isinstance(found, LossSum):
        raise ModelError(
            f"loss(outputs, batch) returned {_told(found)}, which does not say how many samples (or tokens) it is the "
            f"loss of: return their sum and their number, such as {EXAMPLE}, with LossSum from lockstep"
        )
    if not isinstance(found.total, Tensor) or found.total.numel() != 1:
        raise ModelError(
            f"LossSum.total is {_told(found.total)}: it is the sum of the losses, a tensor of one number, such as in "
            f"{EXAMPLE}"
        )
    if not _is_number(found.count) or (not isinstance(found.count, Tensor) and found.count < 0):
        raise ModelError(
            f"LossSum.count is {_told(found.count)}: it is how many samples (or tokens) the total is the sum of, a "
            f"number, such as in {EXAMPLE}"
        )
    if not isinstance(found.sums, Mapping) or not all(map(_is_number, found.sums.values())):
        raise ModelError(
            'LossSum.sums is a dict of further sums over the same samples, one number each, such as {"accuracy": '
            f"number right}}; it is {_told(found.sums)}"
        )
    if not isinstance(found.terms, Mapping):
        raise ModelError(f"LossSum.terms is a dict of LossSums by name; it is {_told(found.terms)}")
    terms = {name: checked(term) for name, term in found.terms.items()}
    count = found.count.reshape(()) if isinstance(found.count, Tensor) else found.count
    sums = {name: torch.as_tensor(value, device=found.total.device).reshape(()) for name, value in found.sums.items()}
    return replace(found, total=found.total.reshape(()), count=count, sums=sums, terms=terms)


def unweighted(loss: LossSum) -> LossSum:
    """The sum of all totals, for whoever asks what they depend on and whether they are sums; it is no loss."""
    return replace(loss, total=sum((term.total for term in loss.terms.values()), start=loss.total), terms={})


def weighted(loss: LossSum, micro_batch: MicroBatch) -> LossSum:
    """The loss with its terms in the total, each as if it counted samples; they are logged under their names. Raises
    ModelError where what they count was not told before, or is something else."""
    if not loss.terms:
        return loss
    weights = micro_batch.weights
    if weights is None:
        return unweighted(loss)
    if weights.keys() != loss.terms.keys():
        raise ModelError(
            f"the loss has the terms {sorted(loss.terms)}, but term_counts(batch) tells the counts of "
            f"{sorted(weights)}: return a number for each term from `term_counts`, beside `loss`"
        )
    samples = len(micro_batch.indices)
    if isinstance(loss.count, int) and loss.count != samples and not (micro_batch.ghost or micro_batch.is_void):
        raise ModelError(
            f"LossSum.count is {loss.count} for {samples} samples: of a loss with terms it is the number of samples; "
            "make what counts tokens, or anything else, a term of its own"
        )
    for name, term in loss.terms.items():
        is_at_hand = not isinstance(term.count, Tensor) or term.count.device.type == "cpu"
        counted = micro_batch.term_counts.get(name, 0.0)
        if is_at_hand and not math.isclose(float(term.count), counted, rel_tol=1e-5):
            raise ModelError(
                f"the term {name!r} of the loss counts {float(term.count):g} in shard {micro_batch.shard} of step "
                f"{micro_batch.step + 1}, where term_counts(batch) has told {counted:g}: let both count the same"
            )
    parts = {name: term.total * weights[name] for name, term in loss.terms.items()}
    total = sum(parts.values(), start=loss.total)
    sums = {**loss.sums, **{name: part.detach() for name, part in parts.items()}}
    return replace(loss, total=total, sums=sums, terms={})


def with_term_weights(
    micro_batches: Sequence[MicroBatch], term_counts: Callable[[Batch], Mapping[str, float]]
) -> Sequence[MicroBatch]:
    """A rank's micro-batches of a step, with the weights of the loss's terms. Every rank calls it, before any forward
    pass; the counts of all shards are added in the order of their numbers. Raises ModelError."""
    counted = [replace(each, term_counts=_counts(term_counts(each.batch))) for each in micro_batches]
    own = {
        each.shard: (len(each.indices), dict.fromkeys(each.term_counts, 0.0) if each.is_void else each.term_counts)
        for each in counted
        if not each.ghost
    }
    shards = dict(sorted(item for found in all_gather_object(own) for item in found.items()))
    samples = sum(number for number, _ in shards.values())
    names = sorted({name for _, counts in shards.values() for name in counts})
    totals = {name: math.fsum(counts.get(name, 0.0) for _, counts in shards.values()) for name in names}
    weights = {name: samples / total if total else 0.0 for name, total in totals.items()}
    return [replace(each, weights=weights) for each in counted]


def _counts(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping) or not all(map(_is_number, found.values())):
        raise ModelError(
            f'term_counts(batch) returns a dict of a number for each term of the loss, such as {{"boxes": 12}}; it '
            f"returned {_told(found)}"
        )
    return {name: float(value) for name, value in found.items()}


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, int | float):
        return f"the number {value!r}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_told(each)}" for name, each in value.items()) + "}"
    return "nothing" if value is None else f"a {type(value).__name__}"
