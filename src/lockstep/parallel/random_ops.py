"""Which operators of a call draw random numbers, and in which shapes: equal lists mean that every draw can be equal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RATES = ("p", "dropout_p")
"""Names of the operators' arguments for a dropout rate."""


class _RandomOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, *arguments: Any) -> Any:
        args, kwargs = arguments[0], arguments[1] or {}
        outputs = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _rate(func, args, kwargs) != 0:
            first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            self.ops.append(f"{func.overloadpacket.__name__}{list(first.shape)}")
        return outputs


def _rate(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dropout rate of an operator's call, 1 where it has none: attention is tagged as random even with rate 0."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in RATES:
            value = args[position] if position < len(args) else argument.default_value
            return kwargs.get(argument.name, value)
    return 1


def random_ops(call: Callable[[], Tensor]) -> list[str]:
    """Run a call without gradients -> the operators that drew random numbers, with their outputs' shapes."""
    with torch.no_grad(), _RandomOps() as mode:
        call()
    return mode.ops
