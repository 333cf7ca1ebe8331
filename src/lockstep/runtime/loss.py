"""Losses as sums, so that any split of a batch gives the same whole."""

import torch.nn.functional as F
from torch import Tensor

from lockstep.contracts import Batch, LossSum


def classification_loss(outputs: Tensor, batch: Batch) -> LossSum:
    """Cross-entropy of logits [m, classes] against batch["label"] [m], with the number that are right."""
    label = batch["label"]
    total = F.cross_entropy(outputs, label, reduction="sum")
    return LossSum(total, label.numel(), {"accuracy": (outputs.argmax(-1) == label).sum()})
