"""How a forward pass uses the model's blocks: which run once, and which have weights that are used elsewhere."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lockstep.base.model_contracts import Batch, Model
from lockstep.core.modules.buffers import copied_buffers
from lockstep.core.modules.outputs import tensors
from lockstep.core.numerics.seeds import generators_restored

METADATA = {"dtype", "device", "shape", "requires_grad", "is_cuda", "ndim", "layout", "grad_fn", "is_leaf"}
"""Attributes of a weight whose access does not count as a use."""


@dataclass
class BlockUses:
    entered: list[nn.Module] = field(default_factory=list)
    """Blocks in the order of their calls; one that runs twice is there twice."""
    outside: dict[nn.Module, str] = field(default_factory=dict)
    """Block -> one of its weights that was used while the block did not run, or why it cannot be sharded alone."""

    def alone(self) -> list[nn.Module]:
        """Blocks that ran once and whose weights nothing else has used, in the order of their calls."""
        return [b for b in self.entered if self.entered.count(b) == 1 and b not in self.outside]


class _WeightUses(TorchFunctionMode):
    """Records operations on the weights of blocks that are not running."""

    def __init__(self, owners: dict[int, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self.owners, self.running, self.uses = owners, list[nn.Module](), BlockUses()

    def enter(self, block: nn.Module, *_: Any) -> None:
        self.running.append(block)
        self.uses.entered.append(block)

    def leave(self, block: nn.Module, _: Any, outputs: Any) -> None:
        """End a block's run. With placeholders, only what forward() differentiates by itself requires a gradient."""
        self.running.remove(block)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(outputs)):
            self.uses.outside.setdefault(block, "a gradient inside of forward()")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "__get__" and getattr(func.__self__, "__name__", "") in METADATA:
            return result
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                block, name = self.owners.get(id(leaf), (None, ""))
                if block is not None and block not in self.running:
                    self.uses.outside.setdefault(block, name)
        return result


def block_uses(
    model: Model,
    blocks: Sequence[nn.Module],
    batch: Batch,
    *,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
) -> BlockUses:
    """Record one forward pass in training mode, without gradients of weights.

    It runs with placeholder weights that take no memory; where the model writes to weights or differentiates by them,
    with copies. The model's weights and buffers and the seeded generators do not change.
    """
    record = partial(_recorded, model, blocks, batch, context=context)
    try:
        return record(values=_placeholders(model, device, are_copies=False))
    except RuntimeError:
        try:
            return record(values=_placeholders(model, device, are_copies=True))
        except RuntimeError:  # as torch.autograd.grad raises it for weights
            values = _placeholders(model, device, are_copies=True)
            return record(values={name: each.requires_grad_(each.is_floating_point()) for name, each in values.items()})


def _recorded(
    model: Model,
    blocks: Sequence[nn.Module],
    batch: Batch,
    *,
    context: Callable[[], AbstractContextManager[Any]],
    values: dict[str, Tensor],
) -> BlockUses:
    block_of = {module: block for block in blocks for module in block.modules()}
    owners = {
        id(values[name]): (block_of[module], name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        if module in block_of
        for name in (f"{prefix}.{key}" if prefix else key for key in module._parameters)
        if name in values
    }
    mode = _WeightUses(owners)
    hooks = [block.register_forward_pre_hook(mode.enter) for block in blocks]
    hooks += [block.register_forward_hook(mode.leave, always_call=True) for block in blocks]
    try:
        with torch.enable_grad(), generators_restored(), copied_buffers(model), context(), mode:
            outputs = torch.func.functional_call(model, values, (batch,), tie_weights=False)
        for leaf in tensors(outputs):
            if id(leaf) in owners:
                mode.uses.outside.setdefault(*owners[id(leaf)])
    finally:
        for hook in hooks:
            hook.remove()
    return mode.uses


def _placeholders(model: Model, device: torch.device, *, are_copies: bool) -> dict[str, Tensor]:
    """Return values for the weights, and for buffers that are not initialised yet."""

    def value(parameter: Tensor) -> Tensor:
        if not are_copies:
            return torch.full((), 0.01, device=device).to(parameter.dtype).expand(parameter.shape)
        if model._lockstep_initial is None:
            return parameter.detach().clone()
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)

    made = {parameter: value(parameter) for parameter in model.parameters()}
    values = {
        f"{prefix}.{key}" if prefix else key: made[parameter]  # each once: a module under two names is restored once
        for prefix, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    if (initial := model._lockstep_initial) is not None:
        # A buffer that was made from a number, such as BatchNorm's counter, is real already: clone it.
        values |= {name: initial(buffer).to(device).clone() for name, buffer in model.named_buffers()}
    return values
