"""A rank that holds the whole model: what `single` and `ddp` have in common."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.contracts import Batch, Model
from lockstep.runtime.accumulation import Accumulation, widened
from lockstep.runtime.gradient_norm import clip_, gradients, row_squares
from lockstep.runtime.precision import Precision
from lockstep.runtime.seeds import Randomness


class Replica:
    """Evaluation, clipping and state of a model that is whole on every rank."""

    def __init__(self, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        self.randomness, self.precision, self.exact = randomness, precision, exact
        self.accumulation: Accumulation | None = None

    def place(self, model: Model) -> nn.Module:
        """Take the model; its own parameters are the ones to optimise. May be called again."""
        if self.accumulation is not None:
            self.accumulation.remove()
        self.model = model
        self.parameters = list(model.parameters())
        self.accumulation = Accumulation(model, self.randomness, self.precision, exact=self.exact)
        return model

    def accumulating(self) -> Accumulation:
        """The accumulation of the placed model."""
        assert self.accumulation is not None, "place() comes first"
        return self.accumulation

    def forward(self, batch: Batch) -> Tensor:
        """Outputs, without gradients; fp32 where autocast gave half precision."""
        with torch.no_grad(), self.precision.autocast():
            return widened(self.model(batch))

    def clip(self, max_norm: float | None) -> Tensor:
        """The global norm, 0-dim; gradients above max_norm are scaled down in place."""
        grads = gradients(self.parameters)
        norm = row_squares(grads).sum().sqrt()
        if max_norm is not None:
            clip_(grads, norm, max_norm)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Weights and buffers by name."""
        return self.model.state_dict()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of state."""
        self.model.load_state_dict(dict(state))
