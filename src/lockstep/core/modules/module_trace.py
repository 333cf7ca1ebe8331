"""Traces of hashes of the bytes of every module's inputs and outputs, to find the first difference between two runs."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.numerics.checksum import bytes_of

Line = dict[str, Any]
Selects = Callable[[MicroBatch], bool]


def fingerprint(value: Any) -> str:
    """Return 16 hex digits over nested tensors, arrays and plain values; of other objects only the type counts."""
    sha = hashlib.blake2b(digest_size=8)
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()
    if isinstance(value, Tensor):
        plain = value.detach()
        plain = (plain.to_dense() if plain.layout != torch.strided else plain).cpu().contiguous()
        sha.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        sha.update(bytes_of(plain.resolve_conj().resolve_neg()))
    elif isinstance(value, np.ndarray):
        sha.update(f"{value.dtype} {value.shape} ".encode())
        sha.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            sha.update(f"{key}: ".encode())
            _feed(sha, item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        sha.update(f"{len(value)} parts ".encode())
        for item in value:
            _feed(sha, item)
    else:
        plain_value = isinstance(value, str | bytes | int | float | None)
        sha.update((repr(value) if plain_value else type(value).__name__).encode())


def descriptions(model: nn.Module) -> dict[str, str]:
    """Return the description of each module by its dotted name: 'body.2 (Noise, my_model.py:12)'."""
    return {name: f"{name or 'the model itself'} ({origin(module)})" for name, module in model.named_modules()}


def class_of(module: nn.Module) -> type:
    """Return a module's class as it was written, not the subclass that FSDP or a parametrization makes of it."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith(("FSDP", "Parametrized")))


def origin(module: nn.Module) -> str:
    """Return the name of a module's class, with file and line unless it is torch's."""
    return _origin(class_of(module))


@cache  # Python parses the whole file to find a class in it
def _origin(kind: type) -> str:
    if kind.__module__.split(".")[0] == "torch":
        return f"torch.nn.{kind.__name__}"
    try:
        return f"{kind.__name__}, {inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):  # defined in a shell, or by exec()
        return f"{kind.__module__}.{kind.__name__}"


def call_hooks(model: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> list[Any]:
    """Have `enter(name, module, args, kwargs)` and `leave(name, module, inputs, outputs)` called around each call of a
    module, before FSDP's own hooks see the outputs -> the hooks' handles."""
    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leave, name), prepend=True))
    return handles


class Trace:
    """Writes a line for every micro-batch, every call of a module in it, and every parameter's gradient from it. A new
    micro-batch begins whenever the model's forward is called in training, in the order given to `expect`."""

    def __init__(self, model: nn.Module, write: Callable[[Line], None], selects: Selects | None = None) -> None:
        """`selects`: whether the calls and gradients of a micro-batch are traced."""
        self.write, self.selects = write, selects
        self.queue: list[MicroBatch] = []
        self.position: dict[str, int] | None = None
        """Step and shard of the current micro-batch."""
        self.inputs: list[str] = []
        write({"kind": "modules", "modules": descriptions(model)})
        self.handles: list[Any] = [model.register_forward_pre_hook(self._begin)]
        self.handles += call_hooks(model, self._enter, self._leave)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.handles.append(parameter.register_hook(partial(self._gradient, name)))

    def expect(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Set the micro-batches that run next, in this order; ghosts are not traced."""
        self.queue, self.position = list(micro_batches), None

    def tensors(self, kind: str, step: int, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        hashes = {name: fingerprint(tensor) for name, tensor in tensors}
        self.write({"kind": kind, "step": step, "tensors": hashes})

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _begin(self, model: nn.Module, _: Any) -> None:
        self.inputs.clear()
        if not model.training or not self.queue:
            self.position = None
            return
        current = self.queue.pop(0)
        self.position = None if current.ghost else {"step": current.step, "shard": current.shard}
        columns = {name: fingerprint(column) for name, column in current.batch.items()}
        self._write(kind="batch", samples=list(current.indices), columns=columns)
        if self.selects is not None and not self.selects(current):
            self.position = None

    def _enter(self, _: str, __: nn.Module, args: Any, kwargs: Any) -> None:
        self.inputs.append(fingerprint([args, kwargs]) if self.position else "")

    def _leave(self, name: str, _: nn.Module, __: Any, outputs: Any) -> None:
        inputs = self.inputs.pop()
        if self.position:
            self._write(kind="call", name=name, inputs=inputs, hash=fingerprint(outputs))

    def _gradient(self, name: str, gradient: Tensor) -> None:
        if self.position:
            self._write(kind="gradient", name=name, hash=fingerprint(gradient))

    def _write(self, **line: Any) -> None:
        if self.position:
            self.write({**line, **self.position})
