"""Deferred initialisation: models that do not fit a process are built without memory, and then filled tensor by tensor
with the bits of a plain build.

While a model is built, its tensors are FakeTensors on the CPU (torch.nn.init skips some operations on meta tensors),
and the operations on them are recorded. Random numbers are drawn into temporary memory, so that the generator advances
as in a plain build. A tensor's value is computed by replaying the operations that it depends on, as in torchdistX.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.base.model_contracts import Model


@dataclass(frozen=True)
class StorageView:
    """View of a fake tensor on its storage when an operation was recorded; later it may be transposed in place."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the view of a fake tensor; other values as they are."""
        if not is_fake(value):
            return value
        return cls(_storage(value), tuple(value.size()), tuple(value.stride()), int(value.storage_offset()))

    def of_memory(self, memory: dict[int, Tensor]) -> Tensor:
        return memory[self.storage].as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Operation:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[StorageView]
    reads: frozenset[int]
    """Addresses of storages."""
    writes: frozenset[int]
    generator: Tensor | None
    """State of torch's generator before it, if it draws random numbers."""


class InitRecorder(TorchDispatchMode, AbstractContextManager["InitRecorder"]):
    """Mode in which new tensors are fake, and operations on them are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.kept: list[Any] = []
        """Outputs, kept alive so that no other storage gets the address of one."""
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        """Run an operation without memory, and record it if it creates or changes a tensor."""
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs))):
            raise NotImplementedError("the state of a model's own generator is not recorded")
        is_factory = not inputs and any(argument.name == "device" for argument in func._schema.arguments)
        if not is_factory and not any(map(is_fake, inputs)):
            return func(*args, **kwargs)
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = torch.default_generator.get_state()
            func(*pytree.tree_map(_allocate, args), **pytree.tree_map(_allocate, kwargs))
        seen_args, seen_kwargs = pytree.tree_map(StorageView.of, args), pytree.tree_map(StorageView.of, kwargs)
        with self.fake:
            outputs = func(*args, **kwargs)
        self.kept.append(outputs)
        reads = frozenset(map(_storage, inputs))
        changed = _tensors([value for value, is_changed in _arguments(func, args, kwargs) if is_changed])
        writes = frozenset(map(_storage, _tensors(outputs))) - reads | frozenset(map(_storage, changed))
        if writes:  # others only make views, which are found by their storage
            views = [StorageView.of(tensor) for tensor in _tensors(outputs)]
            self.operations.append(Operation(func, seen_args, seen_kwargs, views, reads, writes, generator))
        return outputs

    def value(self, tensor: Tensor) -> Tensor:
        """Compute the value of a fake tensor after all operations, on the CPU; return a real one as it is."""
        if not is_fake(tensor):
            return tensor
        needed, chosen = {_storage(tensor)}, []
        for operation in reversed(self.operations):
            if operation.writes & needed:
                chosen.append(operation)
                needed |= operation.reads | operation.writes
        before, memory = torch.default_generator.get_state(), dict[int, Tensor]()
        try:
            with torch.no_grad():
                for operation in reversed(chosen):
                    _replay(operation, memory)
        finally:
            torch.default_generator.set_state(before)
        return StorageView.of(tensor).of_memory(memory)


def _replay(operation: Operation, memory: dict[int, Tensor]) -> None:
    def real(value: Any) -> Any:
        return value.of_memory(memory) if isinstance(value, StorageView) else value

    if operation.generator is not None:
        torch.default_generator.set_state(operation.generator)
    args, kwargs = pytree.tree_map(real, operation.args), pytree.tree_map(real, operation.kwargs)
    results = _tensors(operation.function(*args, **kwargs))
    for result, planned in zip(results, operation.outputs, strict=True):
        if planned.storage in memory:  # changed in place
            continue
        if result.stride() != planned.stride:
            what = f"{operation.function} returns stride {result.stride()}"
            raise RuntimeError(f"{what}, but {planned.stride} was recorded")
        size = result.untyped_storage().nbytes() // result.element_size()
        memory[planned.storage] = result.as_strided((size,), (1,), 0)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, bool]]:
    """Yield each argument's value, and whether the function changes it."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield value, bool(argument.alias_info and argument.alias_info.is_write)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_fake(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, FakeTensor)


def _allocate(value: Any) -> Any:
    if is_fake(value):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return value


def deferred(build: Callable[[], Model]) -> Model | None:
    """Build a model of fake tensors whose `_lockstep_initial` gives the real ones; None where the build reads values,
    has a generator of its own, or keeps tensors outside of parameters and buffers."""
    recorder, before = InitRecorder(), torch.default_generator.get_state()
    try:
        with recorder:
            model = build()
        is_complete = not _hides_fakes(model)
    except Exception:  # any failure on tensors without values; a real mistake is raised again by the plain build
        is_complete = False
    if not is_complete:
        torch.default_generator.set_state(before)
        return None
    model._lockstep_initial = recorder.value
    return model


def _hides_fakes(model: nn.Module) -> bool:
    """Return whether a module, an object or a function of it holds a fake tensor that is no parameter and no buffer."""
    own = {"_parameters", "_buffers", "_modules"}
    left = [value for m in model.modules() for name, value in vars(m).items() if name not in own]
    seen = dict[int, Any]()
    while left:
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(left.pop()) if id(leaf) not in seen}
        if any(map(is_fake, leaves.values())):
            return True
        seen |= leaves
        left += [inner for leaf in leaves.values() for inner in _held(leaf)]
    return False


def _held(value: Any) -> list[Any]:
    """List the values that a function captures, and those in an object that is no module."""
    if isinstance(value, FunctionType):
        return [*inspect.getclosurevars(value).nonlocals.values(), value.__defaults__]
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    return [] if isinstance(value, nn.Module | type | ModuleType) else [getattr(value, "__dict__", None)]


def replace_fake(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's fake parameters and buffers by `make` of them; tied ones stay tied."""
    made: dict[Tensor, Any] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if is_fake(parameter):
                if parameter not in made:
                    made[parameter] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                owner._parameters[name] = made[parameter]
        for name, buffer in owner._buffers.items():
            if is_fake(buffer):
                owner._buffers[name] = made.setdefault(buffer, make(buffer))
