"""Finds what a script does with its model and optimizer outside of the place for it, before it costs the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.base.errors import ModelError

Place = Literal["between", "micro-batch", "backward", "update"]
"""Where the script is: between two steps, in a micro-batch, in step.backward, in the update of the weights."""


class ScriptGuard:
    """Watches a model and an optimizer by hooks until `remove`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.place: Place = "between"
        self.parameters = dict(model.named_parameters())
        self.trained = self._trained()
        self.hooks: list[Any] = [model.register_forward_pre_hook(self._check_forward)]
        self.hooks += [
            parameter.register_post_accumulate_grad_hook(self._check_backward)
            for parameter in self.parameters.values()
            if parameter.requires_grad
        ]
        self.hooks.append(optimizer.register_step_pre_hook(self._check_update))

    def remove(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    @contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def check_step(self, model: nn.Module) -> None:
        """Raise ModelError where a step cannot begin."""
        if not model.training:
            raise ModelError("the model is in evaluation mode: call model.train() before the next step")
        if self._trained() != self.trained:
            raise ModelError("requires_grad of a parameter has changed: set it before lockstep.Loop is made")

    def _trained(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    def _check_forward(self, model: nn.Module, _: Any) -> None:
        if self.place == "between" and model.training and torch.is_grad_enabled():
            raise ModelError(
                "the model is called in training mode outside of `for ... in step`: its random numbers and buffers "
                "would depend on the number of processes. Call it inside, or measure with loop.evaluate, or use "
                "model.eval() and torch.no_grad()"
            )

    def _check_backward(self, _: Tensor) -> None:
        if self.place != "backward":
            raise ModelError("gradients have come by loss.backward(): write step.backward(loss)")

    def _check_update(self, *_: Any) -> None:
        if self.place != "update":
            raise ModelError("remove optimizer.step(): the weights are updated at the end of `for ... in step`")
