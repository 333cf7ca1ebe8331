"""Losses as sums, so that any split of a batch gives the same total."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Outputs
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.modules.outputs import tensors

EXAMPLE = 'LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), len(outputs))'


def checked(loss: Any) -> LossSum:
    """Return a user's loss with its sums as 0-dim tensors. Raises ModelError where it is not a valid LossSum."""
    if not isinstance(loss, LossSum):
        raise ModelError(
            f"loss(outputs, batch) returned {_repr(loss)}, which does not say how many samples (or tokens) it is the "
            f"loss of: return their sum and their number, such as {EXAMPLE}, with LossSum from lockstep"
        )
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1:
        what = f"LossSum.total is {_repr(loss.total)}"
        raise ModelError(f"{what}: it is the sum of the losses, a tensor of one number, such as in {EXAMPLE}")
    if not _is_number(loss.count) or (not isinstance(loss.count, Tensor) and not 0 <= loss.count < math.inf):
        what = f"LossSum.count is {_repr(loss.count)}: it is how many samples (or tokens) the total is the sum of"
        raise ModelError(f"{what}, a number, such as in {EXAMPLE}")
    if not isinstance(loss.sums, Mapping) or not all(map(_is_number, loss.sums.values())):
        what = "LossSum.sums is a dict of further sums over the same samples, one number each"
        raise ModelError(f'{what}, such as {{"accuracy": number right}}; it is {_repr(loss.sums)}')
    if not isinstance(loss.terms, Mapping):
        raise ModelError(f"LossSum.terms is a dict of LossSums by name; it is {_repr(loss.terms)}")
    terms = {name: checked(term) for name, term in loss.terms.items()}
    count = loss.count.reshape(()) if isinstance(loss.count, Tensor) else loss.count
    sums = {name: torch.as_tensor(value, device=loss.total.device).reshape(()) for name, value in loss.sums.items()}
    return replace(loss, total=loss.total.reshape(()), count=count, sums=sums, terms=terms)


def shown(values: Mapping[str, float]) -> dict[str, float]:
    """Leave out the values that are for Model.derived alone."""
    return {name: value for name, value in values.items() if not name.startswith("_")}


def unweighted(loss: LossSum) -> LossSum:
    """Return the plain sum of the totals of all terms, to check what they depend on; not a loss to train with."""
    return replace(loss, total=sum((term.total for term in loss.terms.values()), start=loss.total), terms={})


def weighted(loss: LossSum, micro_batch: MicroBatch) -> LossSum:
    """Add the terms of a loss to its total, each weighted as if it counted samples, and to the logged sums. Raises
    ModelError where term_counts gave no count for a term, or another one."""
    if not loss.terms:
        return loss
    weights = micro_batch.weights
    if weights is None:
        return unweighted(loss)
    if weights.keys() != loss.terms.keys():
        raise ModelError(
            f"the loss has the terms {sorted(loss.terms)}, but term_counts(batch) gives the counts of "
            f"{sorted(weights)}: return a number for each term from `term_counts`, beside `loss`"
        )
    samples = len(micro_batch.indices)
    if isinstance(loss.count, int) and loss.count != samples and not (micro_batch.ghost or micro_batch.is_void):
        what = f"LossSum.count is {loss.count} for {samples} samples: of a loss with terms it is the number of samples"
        raise ModelError(f"{what}; make what counts tokens, or anything else, a term of its own")
    for name, term in loss.terms.items():
        is_on_cpu = not isinstance(term.count, Tensor) or term.count.device.type == "cpu"
        counted = micro_batch.term_counts.get(name, 0.0)
        if is_on_cpu and not math.isclose(float(term.count), counted, rel_tol=1e-5):
            raise ModelError(
                f"the term {name!r} of the loss counts {float(term.count):g} in shard {micro_batch.shard} of step "
                f"{micro_batch.step + 1}, where term_counts(batch) returned {counted:g}: let both count the same"
            )
    terms = {name: term.total * weights[name] for name, term in loss.terms.items()}
    total = sum(terms.values(), start=loss.total)
    sums = {**loss.sums, **{name: term.detach() for name, term in terms.items()}}
    return replace(loss, total=total, sums=sums, terms={})


def with_gradient(loss: LossSum, outputs: Outputs) -> LossSum:
    """Return the loss, with gradients of 0 for what the outputs depend on where it is the constant 0, as of a
    micro-batch that has nothing to learn from. Raises ModelError for any other constant."""
    if loss.total.requires_grad:
        return loss
    nothing = [output.flatten()[:0].sum() for output in tensors(outputs) if output.requires_grad]
    if float(loss.total) != 0 or not nothing:
        raise ModelError(
            "the loss of a micro-batch does not depend on any trained weight: was it detached, or computed under "
            "no_grad(), or are all weights frozen? (Where a micro-batch has nothing to learn from, return the loss 0.)"
        )
    return replace(loss, total=loss.total + sum(nothing))


def with_term_weights(
    micro_batches: Sequence[MicroBatch], term_counts: Callable[[Batch], Mapping[str, float]]
) -> Sequence[MicroBatch]:
    """Return a rank's micro-batches of a step with the weights of the loss's terms. A collective, before any forward
    pass; the counts of the shards are added in their order. Raises ModelError."""
    counted = [replace(each, term_counts=_counts(term_counts(each.batch))) for each in micro_batches]
    own = {
        each.shard: (len(each.indices), dict.fromkeys(each.term_counts, 0.0) if each.is_void else each.term_counts)
        for each in counted
        if not each.ghost
    }
    everyone = {shard: counts for rank in all_gather_object(own) for shard, counts in rank.items()}
    shards = dict(sorted(everyone.items()))  # of which two ranks may have run the same one (observe.recheck)
    samples = sum(number for number, _ in shards.values())
    names = sorted({name for _, counts in shards.values() for name in counts})
    totals = {name: math.fsum(counts.get(name, 0.0) for _, counts in shards.values()) for name in names}
    weights = {name: samples / total if total else 0.0 for name, total in totals.items()}
    return [replace(each, weights=weights) for each in counted]


def _counts(counts: Any) -> dict[str, float]:
    if not isinstance(counts, Mapping) or not all(map(_is_number, counts.values())):
        what = 'term_counts(batch) returns a dict of a number for each term of the loss, such as {"boxes": 12}'
        raise ModelError(f"{what}; it returned {_repr(counts)}")
    return {name: float(value) for name, value in counts.items()}


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _repr(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, int | float):
        return f"the number {value!r}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_repr(each)}" for name, each in value.items()) + "}"
    return "nothing" if value is None else f"a {type(value).__name__}"
