"""How a forward pass uses the model's blocks: which it enters once, and which have weights that are used elsewhere."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lockstep.base.model_contracts import Batch, Model
from lockstep.core.modules.buffers import borrowed
from lockstep.core.numerics.seeds import generators_restored

LOOKS = {"dtype", "device", "shape", "requires_grad", "is_cuda", "ndim", "layout", "grad_fn", "is_leaf"}
"""Attributes of a weight that anybody may ask for: the numbers themselves are not looked at."""


@dataclass
class BlockUses:
    """What one forward pass has shown."""

    entered: list[nn.Module] = field(default_factory=list)
    """Blocks in the order in which they ran, each as often as it did."""
    outside: dict[nn.Module, str] = field(default_factory=dict)
    """Block -> one of its weights that was used while the block did not run."""

    def alone(self) -> list[nn.Module]:
        """Those that ran once and whose weights nothing else has used, in the order in which they ran."""
        return [b for b in self.entered if self.entered.count(b) == 1 and b not in self.outside]


class _Watch(TorchFunctionMode):
    """Sees which weights the operations take while which blocks run."""

    def __init__(self, owners: dict[int, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self.owners, self.running, self.found = owners, list[nn.Module](), BlockUses()

    def enter(self, block: nn.Module, *_: Any) -> None:
        self.running.append(block)
        self.found.entered.append(block)

    def leave(self, block: nn.Module, *_: Any) -> None:
        self.running.remove(block)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        """Note the weights that an operation takes."""
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "__get__" and getattr(func.__self__, "__name__", "") in LOOKS:
            return result
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                block, name = self.owners.get(id(leaf), (None, ""))
                if block is not None and block not in self.running:
                    self.found.outside.setdefault(block, name)
        return result


def block_uses(
    model: Model,
    blocks: Sequence[nn.Module],
    batch: Batch,
    *,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
) -> BlockUses:
    """Run a model forwards once in training mode, without gradients, and look.

    It runs with weights that take no memory and mean nothing; where its code writes to them, with copies. Its own
    weights, its buffers and the seeded generators stay as they were.
    """
    for are_copies in (False, True):
        try:
            return _seen(model, blocks, batch, context=context, values=_stand_ins(model, device, are_copies=are_copies))
        except RuntimeError:
            if are_copies:
                raise
    raise AssertionError("one of both has returned or raised")


def _seen(
    model: Model,
    blocks: Sequence[nn.Module],
    batch: Batch,
    *,
    context: Callable[[], AbstractContextManager[Any]],
    values: dict[str, Tensor],
) -> BlockUses:
    block_of = {part: block for block in blocks for part in block.modules()}
    owners = {
        id(values[name]): (block_of[part], name)
        for prefix, part in model.named_modules(remove_duplicate=False)
        if part in block_of
        for name in (f"{prefix}.{key}" if prefix else key for key in part._parameters)
        if name in values
    }
    watch = _Watch(owners)
    hooks = [block.register_forward_pre_hook(watch.enter) for block in blocks]
    hooks += [block.register_forward_hook(watch.leave, always_call=True) for block in blocks]
    try:
        with torch.no_grad(), generators_restored(), borrowed(model), context(), watch:
            torch.func.functional_call(model, values, (batch,))
    finally:
        for hook in hooks:
            hook.remove()
    return watch.found


def _stand_ins(model: Model, device: torch.device, *, are_copies: bool) -> dict[str, Tensor]:
    """Values for the weights, and for buffers that have none yet."""

    def value(parameter: Tensor) -> Tensor:
        if not are_copies:
            return torch.full((), 0.01, device=device).to(parameter.dtype).expand(parameter.shape)
        if model._lockstep_initial is None:
            return parameter.detach().clone()
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)

    found = {name: value(parameter) for name, parameter in model.named_parameters()}
    initial = model._lockstep_initial
    if initial is not None:
        # Copies: a buffer that was made of a number, such as BatchNorm's counter, has its memory already.
        found |= {name: initial(buffer).to(device).clone() for name, buffer in model.named_buffers()}
    return found
