"""A rank that holds parts of the model: what `fsdp`, `pipeline` and `tensor` have in common."""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.base.model_contracts import Batch, Model, Outputs
from lockstep.core.modules.dtensors import kept_buffers, like, tied
from lockstep.core.modules.outputs import widened
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.gradient_norm import GradientPieces, Rows


class Sharded:
    """Evaluation, clipping and state of a model of which every rank holds some parts."""

    outputs: Callable[[Batch], Outputs]
    """The model's, which all ranks compute together."""
    whole: dict[str, Tensor]
    """This rank's parameters as they go into the state, by their first name: spread tensors where they are cut."""
    parts: dict[str, torch.nn.Parameter]
    """The numbers of them that lie here."""
    norm: Rows | GradientPieces
    """How the norm of the parts' gradients becomes that of all."""

    def __init__(self, randomness: Randomness, precision: Precision) -> None:
        self.randomness, self.precision, self.device = randomness, precision, precision.device
        self.copies: tuple[int, ...] = ()
        self.placed: Model | None = None

    def take(self, model: Model) -> None:
        """Begin to spread a model, while it has the names and buffers that it was built with."""
        if self.placed is model:
            raise RuntimeError("a model that is spread already cannot be placed again: build it anew")
        self.model = self.placed = model
        self.names, self.buffers = tied(model), kept_buffers(model)

    def forward(self, batch: Batch) -> Outputs:
        """Outputs, without gradients; fp32 where autocast gave half precision."""
        with torch.no_grad(), self.precision.autocast():
            return widened(self.outputs(batch))

    def clip(self, max_norm: float | None) -> Tensor:
        """The global norm, 0-dim; gradients above max_norm are scaled down in place."""
        return self.norm.clip(self.parts, max_norm)

    def state(self) -> dict[str, Tensor]:
        """This rank's weights and buffers by name: spread tensors where they are cut."""
        weights = {name: self.whole[first] for name, first in self.names.items() if first in self.whole}
        return {**weights, **{name: b for name, b in self.model.named_buffers() if name in self.buffers}}

    def sharded(self, name: str, part: Tensor) -> Tensor:
        return like(self.whole[name], part)
