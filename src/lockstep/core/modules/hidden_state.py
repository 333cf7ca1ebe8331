"""What a model's code keeps outside of its parameters and buffers: attributes of modules and of the objects that they
hold, generators of its own, and what its functions use of their file's globals and closures."""

import itertools
import os
import random
import site
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.base import plugins
from lockstep.core.modules.dtensors import is_spread
from lockstep.core.modules.module_trace import fingerprint
from lockstep.core.numerics.checksum import checksum

BASE = frozenset(vars(nn.Module()))
"""Attributes of every module, hooks and all."""
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, itertools.count)
"""What is compared by its text; numbers and the like, which nothing can change in place."""
LIBRARIES = ("torch", "numpy", "lockstep", "threading", "_thread", "concurrent", "logging", "multiprocessing")
"""Objects of theirs are not looked into."""
FOREIGN = tuple(
    os.path.realpath(place) + os.sep
    for place in (*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__), str(plugins.ROOT))
)
LARGE = 2**28
"""Bytes: larger arrays are neither copied nor compared, but for a tensor's count of changes in place."""
MOST_VALUES = 100_000
DEPTH = 8


@dataclass(frozen=True)
class Mark:
    root: str
    """The attribute or the global that it is, or that holds it."""
    owner: Any
    """The module, the class or the function whose it is."""
    kind: str
    """Name of the value's type."""
    text: str


class Snapshot:
    """All such values of a model as they are now, and the way back to them.

    Tensors, arrays, numbers, containers, generators and plain objects are known; of others only which one it is.
    Without `is_kept` it only looks, and makes no copies.
    """

    def __init__(self, model: nn.Module, *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.marks: dict[str, Mark] = {}
        self._undo: list[Callable[[], None]] = []
        self._known = {id(t) for t in (*model.parameters(), *model.buffers())} | {id(m) for m in model.modules()}
        self._kept: list[Any] = []
        self._functions: list[FunctionType] = []
        for name, module in model.named_modules():
            self._attributes(module, name, module)
        classes = {c: m for m in model.modules() for c in type(m).__mro__ if c.__module__.split(".")[0] != "torch"}
        for kind in classes:
            self._class(kind)
        self._globals()

    def restore(self) -> None:
        """Everything as it was, as far as it is known."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()

    def _attributes(self, module: nn.Module, name: str, owner: Any) -> None:
        own = {key: value for key, value in vars(module).items() if key not in BASE}
        self._undo.append(partial(_refill, vars(module), own, BASE))
        for key, value in own.items():
            path = f"{name}.{key}" if name else key
            self._visit(path, value, root=path, owner=owner)

    def _class(self, kind: type) -> None:
        for key, value in vars(kind).items():
            plain = getattr(value, "__func__", value)
            plain = getattr(plain, "fget", plain)
            if isinstance(plain, FunctionType):
                self._function(plain)
            elif not key.startswith("__") and not callable(value) and not hasattr(value, "__get__") and is_own(kind):
                root = f"{kind.__qualname__}.{key}"
                self._visit(root, value, root=root, owner=kind)
                if isinstance(value, PLAIN):
                    self._undo.append(partial(setattr, kind, key, value))

    def _function(self, function: Any) -> None:
        if isinstance(function, FunctionType) and function not in self._functions and is_own(function):
            self._functions.append(function)

    def _globals(self) -> None:
        """Of every function that is reached, by name, from those of the model."""
        seen: set[tuple[int, str]] = set()
        for function in self._functions:  # which grows meanwhile
            held = function.__globals__
            for name in _names(function.__code__):
                if (id(held), name) in seen or name.startswith("__"):
                    continue
                seen.add((id(held), name))
                self._undo.append(partial(_put_back, held, name, held.get(name, _put_back)))
                if name in held:
                    self._visit(name, held[name], root=name, owner=function)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                value = cell.cell_contents
                root = f"{name} of {function.__qualname__}"
                self._undo.append(partial(setattr, cell, "cell_contents", value))
                self._visit(root, value, root=root, owner=function)

    def _visit(self, path: str, value: Any, *, root: str, owner: Any, depth: int = 0) -> None:
        if isinstance(value, FunctionType | MethodType):
            self._function(value.__func__ if isinstance(value, MethodType) else value)
            return
        if id(value) in self._known or depth > DEPTH or len(self.marks) > MOST_VALUES or is_opaque(value):
            return
        if not isinstance(value, PLAIN):
            self._known.add(id(value))
            self._kept.append(value)  # or another would get its id
        self.marks[path] = Mark(root, owner, type(value).__name__, mark_of(value))
        inner = partial(self._visit, root=root, owner=owner, depth=depth + 1)
        if isinstance(value, nn.Module):
            self._attributes(value, path, owner)
            for key, held in (*value._buffers.items(), *value._modules.items()):
                inner(f"{path}.{key}", held)
        elif self.is_kept and (way_back := undo_of(value)) is not None:
            self._undo.append(way_back)
        for key, part in parts_of(value):
            inner(f"{path}{key}", part)


def changed(before: Snapshot, after: Snapshot) -> dict[str, Mark]:
    """The values that differ between two snapshots, by attribute or global."""
    found: dict[str, Mark] = {}
    for path in [*before.marks, *after.marks]:
        one, other = before.marks.get(path), after.marks.get(path)
        mark = other or one
        assert mark is not None
        if one is None or other is None or one.text != other.text:
            found.setdefault(mark.root, mark)
    return found


def is_own(thing: Any) -> bool:
    """Whether a class or function is of a user's file, not of an installed package."""
    if isinstance(thing, FunctionType):
        return not os.path.realpath(thing.__code__.co_filename).startswith(FOREIGN)
    functions = [value for value in vars(thing).values() if isinstance(value, FunctionType)]
    return bool(functions) and is_own(functions[0])


def is_opaque(value: Any) -> bool:
    """What is not looked into: code, types, and what libraries hold for themselves."""
    if isinstance(value, nn.Parameter) or is_spread(value):
        return True
    if isinstance(value, (Tensor, nn.Module, torch.Generator, np.ndarray, np.generic, *PLAIN)):
        return False
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return False
    if isinstance(value, type | ModuleType | CodeType | partial) or callable(value) and is_opaque_class(type(value)):
        return True
    return is_opaque_class(type(value))


def is_opaque_class(kind: type) -> bool:
    """Whether a class is a library's."""
    return kind.__module__.split(".")[0] in LIBRARIES


def mark_of(value: Any) -> str:
    """Text that differs where the value does; of a container only its kind and length."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        if value.numel() * value.element_size() > LARGE or value.is_meta:
            return f"{tuple(value.shape)} {value._version}"
        return str(checksum(value).item())
    if isinstance(value, np.ndarray | np.generic):
        return str(value.shape) if value.nbytes > LARGE or value.dtype.hasobject else fingerprint(np.asarray(value))
    state = generator_state(value)
    if state is not None:
        return fingerprint(state)
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, CONTAINERS) else type(value).__name__


CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def generator_state(value: Any) -> Any:
    """The state of a random number generator; None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.get_state()) if isinstance(value, np.random.RandomState) else None


def undo_of(value: Any) -> Callable[[], None] | None:
    """What brings a value back that may be changed in place; None where nothing can."""
    if isinstance(value, Tensor):
        if value.requires_grad or value.numel() * value.element_size() > LARGE or value.is_meta:
            return None
        return partial(_write_back, value, value.detach().clone(), mark_of(value))
    if isinstance(value, np.ndarray):
        return partial(_copy_into, value, value.copy()) if value.nbytes <= LARGE and value.flags.writeable else None
    if isinstance(value, torch.Generator):
        return partial(_set_state, value, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate()) if generator_state(value) is not None else None
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return _undo_of_container(value)


def _undo_of_container(value: Any) -> Callable[[], None] | None:
    if isinstance(value, dict):
        return partial(_refill, value, dict(value), frozenset())
    if isinstance(value, list):
        return partial(value.__setitem__, slice(None), list(value))
    if isinstance(value, set | deque):
        return partial(_filled_again, value, list(value))
    if not isinstance(value, tuple | frozenset) and hasattr(value, "__dict__"):
        return partial(_refill, vars(value), dict(vars(value)), frozenset())
    return None


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, each with how it is reached."""
    if isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "{}", sorted(map(repr, value))
    elif not isinstance(value, nn.Module | Tensor | random.Random) and hasattr(value, "__dict__"):
        yield from ((f".{key}", part) for key, part in vars(value).items())


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _refill(target: dict[Any, Any], values: dict[Any, Any], spared: frozenset[str]) -> None:
    for key in [key for key in target if key not in values and key not in spared]:
        del target[key]
    target.update(values)


def _put_back(held: dict[str, Any], name: str, value: Any) -> None:
    """A global as it was; one that was not there goes (told by this very function in its place)."""
    if value is _put_back:
        held.pop(name, None)
    else:
        held[name] = value


def _write_back(tensor: Tensor, before: Tensor, mark: str) -> None:
    if tensor.shape != before.shape:
        tensor.data = before
    elif mark_of(tensor) != mark:
        tensor.detach().copy_(before)


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _copy_into(array: np.ndarray, before: np.ndarray) -> None:
    array[...] = before


def _filled_again(target: Any, values: list[Any]) -> None:
    target.clear()
    target.update(values) if isinstance(target, set) else target.extend(values)
