"""Documents of a sample that are kept apart: what a token attends to, its position, and whether a model keeps to it.

m = samples, T = tokens of one, V = vocabulary. The column "document", int64 [m, T], numbers the documents of a sample.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Model
from lockstep.core.modules.outputs import logits_of

DOCUMENT = "document"
TOLERANCE = 1e-4
"""Largest difference by rounding, as a part of the largest logit, where rows of a batch are computed in another order.
Reading ahead, or in another document, changes 1e-2."""
COARSE = 0.05
"""Largest difference in a format of 16 bits, as a part of the largest logit."""


def positions_of(document: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0, int64 [m, T]."""
    order = torch.arange(document.shape[1], device=document.device)
    is_first = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    return order - (order * is_first).cummax(1).values


def visible_of(document: Tensor) -> Tensor:
    """Return what each token may attend to: itself and those before it in its document, bool [m, 1, T, T]."""
    order = torch.arange(document.shape[1], device=document.device)
    return ((document[:, :, None] == document[:, None, :]) & (order <= order[:, None]))[:, None]


def keeps_apart(model: Model, *, vocabulary: int) -> bool:
    """Return whether a document has the same logits behind another one as alone; True where there are no logits.

    Passes on what the model raises, which that of a model without memory for its weights (deferred_init) does: it is
    then built with memory.
    """
    tokens = torch.tensor([[1, 2, 3, 0, 2, 0, 1]]) % vocabulary
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            behind, alone = (
                logits_of(model({"input_ids": tokens[:, start:], DOCUMENT: document[:, start:]})) for start in (0, 4)
            )
    finally:
        model.train(was_training)
    return behind is None or alone is None or are_close(behind[:, 4:], alone)


def not_apart(what: str) -> ModelError:
    """Return the error for a model, `what`, that does not keep documents apart."""
    return ModelError(
        f"{what} does not keep the documents of a sample apart, as data.documents=apart asks: what it predicts in one "
        "depends on the one before. Set data.documents=joined, or take another model"
    )


def are_close(one: Tensor, other: Tensor) -> bool:
    """Return whether logits differ by rounding only."""
    tolerance = TOLERANCE if other.dtype == torch.float32 else COARSE
    return torch.allclose(one, other, rtol=0, atol=tolerance * float(other.abs().max()), equal_nan=True)
