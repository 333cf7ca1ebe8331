"""Losses as sums, so that any split of a batch gives the same whole."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.contracts import Batch, LossSum
from lockstep.errors import ModelError


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
            f"loss of: return their sum and their number, such as {EXAMPLE}, with LossSum from lockstep.contracts"
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
    count = found.count.reshape(()) if isinstance(found.count, Tensor) else found.count
    sums = {name: torch.as_tensor(value, device=found.total.device).reshape(()) for name, value in found.sums.items()}
    return replace(found, total=found.total.reshape(()), count=count, sums=sums)


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
