"""Models larger than a process may hold: built without memory, then filled tensor by tensor with the bits that a plain
build would have given.

While a model is built, its tensors are PyTorch's fake ones (a shape on the meta device that says it were on the CPU: of
a plain one, torch.nn.init skips some), and what is done to them is written down. Random numbers are drawn all the same,
into memory that is given back at once, so that later ones are the same. A tensor's value is then what those operations
give that it depends on. Related: torchdistX, deferred_init.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.base.model_contracts import Model


@dataclass(frozen=True)
class Lying:
    """How a fake tensor lay in its memory at the time; it may be turned around later."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, value: Any) -> Any:
        """For a fake tensor; others as they are."""
        if not is_fake(value):
            return value
        return cls(_storage(value), tuple(value.size()), tuple(value.stride()), int(value.storage_offset()))

    def within(self, memory: dict[int, Tensor]) -> Tensor:
        """The real tensor that lies there."""
        return memory[self.storage].as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Operation:
    """Something that was done to fake tensors."""

    function: Any
    args: Any
    kwargs: Any
    outputs: list[Lying]
    reads: frozenset[int]
    """Storages, by address."""
    writes: frozenset[int]
    generator: Tensor | None
    """The state of torch's generator before it, where it draws."""


class Recorder(TorchDispatchMode, AbstractContextManager["Recorder"]):
    """Inside, new tensors are fake."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.kept: list[Any] = []
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        """Run an operation without memory, and write it down if it makes or changes a tensor."""
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs))):
            raise NotImplementedError("a generator of the model's own goes on from wherever it has got to")
        is_factory = not inputs and any(argument.name == "device" for argument in func._schema.arguments)
        if not is_factory and not any(map(is_fake, inputs)):
            return func(*args, **kwargs)
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = torch.default_generator.get_state()
            func(*pytree.tree_map(_scratch, args), **pytree.tree_map(_scratch, kwargs))
        seen_args, seen_kwargs = pytree.tree_map(Lying.of, args), pytree.tree_map(Lying.of, kwargs)
        with self.fake:
            outputs = func(*args, **kwargs)
        self.kept.append(outputs)  # or another storage could get its address
        reads = frozenset(map(_storage, inputs))
        changed = _tensors([value for value, is_changed in _arguments(func, args, kwargs) if is_changed])
        writes = frozenset(map(_storage, _tensors(outputs))) - reads | frozenset(map(_storage, changed))
        if writes:  # a view of something is found by its storage
            lying = [Lying.of(tensor) for tensor in _tensors(outputs)]
            self.operations.append(Operation(func, seen_args, seen_kwargs, lying, reads, writes, generator))
        return outputs

    def value(self, tensor: Tensor) -> Tensor:
        """What a fake tensor would be after all operations, on the CPU; a real one as it is."""
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
                    _repeat(operation, memory)
        finally:
            torch.default_generator.set_state(before)
        return Lying.of(tensor).within(memory)


def _repeat(operation: Operation, memory: dict[int, Tensor]) -> None:
    def real(value: Any) -> Any:
        return value.within(memory) if isinstance(value, Lying) else value

    if operation.generator is not None:
        torch.default_generator.set_state(operation.generator)
    args, kwargs = pytree.tree_map(real, operation.args), pytree.tree_map(real, operation.kwargs)
    results = _tensors(operation.function(*args, **kwargs))
    for result, planned in zip(results, operation.outputs, strict=True):
        if planned.storage in memory:  # changed in place
            continue
        if result.stride() != planned.stride:
            raise RuntimeError(f"{operation.function} gives {result.stride()}, where {planned.stride} was told")
        size = result.untyped_storage().nbytes() // result.element_size()
        memory[planned.storage] = result.as_strided((size,), (1,), 0)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, bool]]:
    """Each argument's value, and whether the function changes it."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield value, bool(argument.alias_info and argument.alias_info.is_write)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_fake(value: Any) -> TypeGuard[Tensor]:
    """Whether something is a tensor without memory."""
    return isinstance(value, FakeTensor)


def _scratch(value: Any) -> Any:
    if is_fake(value):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return value


def deferred(build: Callable[[], Model]) -> Model | None:
    """A model of fake tensors, which knows how to get the real ones; None where its construction looks at numbers,
    has a generator of its own, or keeps tensors where nobody would look for them."""
    recorder, before = Recorder(), torch.default_generator.get_state()
    try:
        with recorder:
            model = build()
        is_open = not _hides_fakes(model)
    except Exception:  # whatever a build makes of tensors without numbers; a mistake comes again in the plain one
        is_open = False
    if not is_open:
        torch.default_generator.set_state(before)
        return None
    model._lockstep_initial = recorder.value
    return model


def _hides_fakes(model: nn.Module) -> bool:
    """Whether a module has a fake tensor that is neither a parameter nor a buffer."""
    own = {"_parameters", "_buffers", "_modules"}
    held = [value for m in model.modules() for name, value in vars(m).items() if name not in own]
    return any(map(is_fake, pytree.tree_leaves(held)))


def replace_fake(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put others in the place of a module's fake parameters and buffers; what is tied stays tied."""
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
