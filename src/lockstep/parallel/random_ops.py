"""What a call draws at random, and in which shapes: the same list means that every draw could be the same."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RATES = ("p", "dropout_p")
"""Arguments by which operators are told how much to drop out."""


class _Draws(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = given[0], given[1] or {}
        outputs = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _rate(func, args, kwargs) != 0:
            first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            self.found.append(f"{func.overloadpacket.__name__}{list(first.shape)}")
        return outputs


def _rate(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The rate of dropout that an operator was called with, 1 where it has none: attention is marked as random even
    where nothing is dropped out."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name in RATES:
            given = args[place] if place < len(args) else argument.default_value
            return kwargs.get(argument.name, given)
    return 1


def draws(call: Callable[[], Tensor]) -> list[str]:
    """Run a call without gradients -> the operators that drew random numbers, with the shapes of what they gave."""
    with torch.no_grad(), _Draws() as seen:
        call()
    return seen.found
