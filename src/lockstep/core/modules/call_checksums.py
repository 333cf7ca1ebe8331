"""Every call of a module in a forward pass, as checksums of what it took and what it gave."""

import weakref
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.numerics.checksum import checksum, tensors_of

LOSS = "the loss"
Call = tuple[str, int, int]
"""A module's name, the checksums of its inputs and of its outputs."""


class CallChecksums:
    """Inside, the calls of a model's modules are watched, in the order in which they end; `read` gives them.

    Calls while the model is in the other mode are left out: a strategy may look at shapes in evaluation.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.is_training = model, model.training
        self.changed: set[str] = set()
        """Parameters that a forward pass has written to."""
        self._versions: dict[str, list[int]] = {}
        self.found: list[tuple[str, Tensor, Tensor]] = []
        self._open: dict[str, list[Tensor]] = {}
        self._sums: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "CallChecksums":
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(partial(self._leave, name), prepend=True))  # before FSDP's
        return self

    def __exit__(self, *_: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def read(self) -> list[Call]:
        """The calls; waits for the device."""
        return [(name, int(taken), int(given)) for name, taken, given in self.found]

    def sum_of(self, value: Any) -> Tensor:
        """One checksum for all tensors of a nest, each of which is read once as long as nothing writes to it."""
        total: Tensor | None = None
        for tensor in tensors_of(value):
            own = self._sum(tensor)
            total = own if total is None else total.to(own.device) * 1_000_003 + own
        return torch.zeros((), dtype=torch.int64) if total is None else total

    def _sum(self, tensor: Tensor) -> Tensor:
        known = self._sums.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        made = checksum(tensor)
        self._sums[id(tensor)] = weakref.ref(tensor), tensor._version, made
        return made

    def _enter(self, name: str, module: nn.Module, *given: Any) -> None:
        if module is self.model:
            self._open.clear()  # a pass that was left early has open calls
        if self.model.training == self.is_training:
            self._open.setdefault(name, []).append(self.sum_of(given))
            self._versions[name] = [p._version for p in module.parameters(recurse=False)]

    def _leave(self, name: str, module: nn.Module, *given: Any) -> None:
        if self.model.training == self.is_training and self._open.get(name):
            own = zip(self._versions[name], module.named_parameters(recurse=False), strict=False)
            self.changed |= {f"{name}.{key}".lstrip(".") for before, (key, p) in own if p._version != before}
            self.found.append((name, self._open[name].pop(), self.sum_of(given[-1])))


def in_common(one: list[Call], other: list[Call]) -> tuple[list[Call], list[Call]]:
    """Of two ranks that may run other parts of a model, the calls that both have made, in one order."""
    numbered = []
    for calls in (one, other):
        times: Counter[str] = Counter()
        table = {}
        for call in calls:
            table[call[0], times[call[0]]] = call
            times[call[0]] += 1
        numbered.append(table)
    both = [key for key in numbered[0] if key in numbered[1]]
    return [numbered[0][key] for key in both], [numbered[1][key] for key in both]


def first_difference(one: list[Call], other: list[Call]) -> str | None:
    """The first module that gave other outputs for equal inputs, else the first whose calls differ; calls come in the
    order in which they end, so an inner module comes before the one around it."""
    for a, b in zip(one, other, strict=False):
        if a[0] != b[0]:
            return a[0]
        if a[1] == b[1] and a[2] != b[2]:
            return a[0]
    if len(one) != len(other):
        return max(one, other, key=len)[min(len(one), len(other))][0]
    return next((a[0] for a, b in zip(one, other, strict=True) if a != b), None)
