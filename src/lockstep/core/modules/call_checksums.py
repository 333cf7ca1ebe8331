"""Checksums of the inputs and outputs of every module call in a forward pass."""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.modules.dtensors import local_tensor
from lockstep.core.modules.module_trace import call_hooks
from lockstep.core.numerics.checksum import checksum, tensors_of

LOSS = "the loss"
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
Call = tuple[str, int, int]
"""A module's name, the checksums of its inputs and of its outputs."""


class CallChecksums:
    """Records the calls of a model's modules while it is entered, in the order in which they end. Calls in the other
    mode, training or evaluation, are ignored: a strategy may run the model to find shapes."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.is_training = model, model.training
        self.changed: set[str] = set()
        """Parameters that a forward pass has written to."""
        self._versions: dict[str, list[int]] = {}
        self._modes = _DataWrites(self), _WritesToMemory(self)
        self.calls: list[tuple[str, Tensor, Tensor]] = []
        self._open: dict[str, list[Tensor]] = {}
        self._sums: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "CallChecksums":
        self._hooks = call_hooks(self.model, self._enter, self._leave)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        while self._hooks:
            self._hooks.pop().remove()

    def read(self) -> list[Call]:
        """Return the calls; synchronises with the device."""
        return [(name, int(inputs), int(outputs)) for name, inputs, outputs in self.calls]

    def sum_of(self, value: Any) -> Tensor:
        """Compute one checksum of all tensors in nested containers; each is read again only after it was written to."""
        total: Tensor | None = None
        for tensor in tensors_of(value):
            own = self._sum(tensor)
            total = own if total is None else total.to(own.device) * 1_000_003 + own
        return torch.zeros((), dtype=torch.int64) if total is None else total

    def _sum(self, tensor: Tensor) -> Tensor:
        cached = self._sums.get(id(tensor))
        if cached is not None and cached[0]() is tensor and cached[1] == tensor._version:
            return cached[2]
        value = checksum(tensor)
        self._sums[id(tensor)] = weakref.ref(tensor), tensor._version, value
        return value

    def _enter(self, name: str, module: nn.Module, *inputs: Any) -> None:
        if module is self.model:
            self._open.clear()  # a forward pass that raised leaves calls open
        if self.model.training == self.is_training:
            self._open.setdefault(name, []).append(self.sum_of(inputs))
            self._versions[name] = [p._version for p in module.parameters(recurse=False)]

    def _leave(self, name: str, module: nn.Module, *arguments: Any) -> None:
        if self.model.training == self.is_training and self._open.get(name):
            own = zip(self._versions[name], module.named_parameters(recurse=False), strict=False)
            self.changed |= {f"{name}.{key}".lstrip(".") for before, (key, p) in own if p._version != before}
            self.calls.append((name, self._open[name].pop(), self.sum_of(arguments[-1])))


class _DataWrites(TorchFunctionMode):
    """Notices `parameter.data = ...`, which autograd does not count, and which FSDP's parameters do not even keep."""

    def __init__(self, calls: CallChecksums) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        if func == SET_DATA and isinstance(args[0], nn.Parameter):
            self.calls.changed |= {name for name, p in self.calls.model.named_parameters() if p is args[0]}
        return func(*args, **(kwargs or {}))


class _WritesToMemory(TorchDispatchMode):
    """Notices writes to a parameter's memory by another tensor, such as `parameter.data.clamp_(...)`, which autograd
    does not count, and which FSDP loses with the gathered weights."""

    def __init__(self, calls: CallChecksums) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        schema = func._schema
        if func.namespace == "aten" and schema.is_mutable:  # FSDP's and c10d's own have other names
            named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | (kwargs or {})
            written = [named.get(each.name) for each in schema.arguments if each.is_write]
            memory = {_memory(leaf) for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)} - {0}
            self.calls.changed |= {name for name, p in self.calls.model.named_parameters() if _memory(p) in memory}
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Return where the memory of a tensor, and of its views, begins; 0 where it has none."""
    return local_tensor(tensor).untyped_storage().data_ptr()


def in_common(one: list[Call], other: list[Call]) -> tuple[list[Call], list[Call]]:
    """Return the calls that both of two ranks have made, in one order; they may run different stages of a model."""
    numbered = []
    for calls in (one, other):
        times: Counter[str] = Counter()
        by_number = {}
        for call in calls:
            by_number[call[0], times[call[0]]] = call
            times[call[0]] += 1
        numbered.append(by_number)
    both = [key for key in numbered[0] if key in numbered[1]]
    return [numbered[0][key] for key in both], [numbered[1][key] for key in both]


def first_difference(one: list[Call], other: list[Call]) -> str | None:
    """Return the first module with other outputs for equal inputs, else the first whose calls differ. An inner module
    comes before the one around it, because calls are ordered by their end."""
    for a, b in zip(one, other, strict=False):
        if a[0] != b[0]:
            return a[0]
        if a[1] == b[1] and a[2] != b[2]:
            return a[0]
    if len(one) != len(other):
        return max(one, other, key=len)[min(len(one), len(other))][0]
    return next((a[0] for a, b in zip(one, other, strict=True) if a != b), None)
