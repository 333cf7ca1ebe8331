"""FSDP's units: run in one order by every rank, and with the sums of a plain backward pass."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Model


class OrderedUnits:
    """Checks that every micro-batch runs all units, in the order of the first one: a rank that left one out would wait
    for another collective than its peers."""

    def __init__(self, model: Model, units: Sequence[nn.Module]) -> None:
        named = {module: name for name, module in model.named_modules()}
        self.model, self.units, self.names = model, list(units), [named[unit] for unit in units]
        self.number = 0
        """The unit that has to come next."""

    def watch(self) -> None:
        """Look before FSDP does; once it has wrapped the units."""
        for number, unit in enumerate(self.units):
            unit.register_forward_pre_hook(partial(self._enter, number), prepend=True)
        self.model.register_forward_hook(self._end)

    def start(self) -> None:
        self.number = 0

    def _enter(self, number: int, unit: nn.Module, _: Any) -> None:
        if not (unit.training and torch.is_grad_enabled()):
            return
        if number != self.number:
            self._refuse(min(number, self.number))
        self.number += 1

    def _end(self, *_: Any) -> None:
        if self.model.training and torch.is_grad_enabled() and self.number < len(self.units):
            self._refuse(self.number)

    def _refuse(self, number: int) -> None:
        raise ModelError(
            f"{self.names[number]} does not run once in every micro-batch, at the same place, and parallel.kind=fsdp "
            "gathers the weights of a block on all processes when it runs: leave it out of blocks(), so that it is "
            "gathered with the rest of the model, or use parallel.kind=ddp with parallel.find_unused=true"
        )


def own_memory(_: nn.Module, __: Any, outputs: Any) -> Any:
    """A unit's outputs, copied where they are views: FSDP's hook on a view is lost when it is changed in place."""
    if not torch.is_grad_enabled():
        return outputs
    leaves, spec = pytree.tree_flatten(outputs)
    if not any(isinstance(leaf, Tensor) and leaf._base is not None for leaf in leaves):
        return outputs
    own = [leaf.clone() if isinstance(leaf, Tensor) and leaf._base is not None else leaf for leaf in leaves]
    return pytree.tree_unflatten(own, spec)


def announce_backward(module: Any) -> None:
    """Let FSDP notice the end of a unit's backward pass by views of what it is given, not by a function of its own
    between them, which would forbid changes in place and add up the gradients of several inputs in another order."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            group._register_post_backward_hook = partial(_hooked, group)


def _hooked(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not torch.is_grad_enabled():
        return args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    taken = [leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
    hooked = [leaf for leaf in taken if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not hooked:
        return args, kwargs
    register_multi_grad_hook(hooked, lambda _: group.post_backward())
    args, kwargs = pytree.tree_unflatten(taken, spec)
    return args, kwargs
