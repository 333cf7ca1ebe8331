"""State that a model's code keeps outside of parameters and buffers: attributes of modules and of the objects that they
hold, generators of its own, and the globals and closures that its functions use."""

import itertools
import os
import random
import site
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from types import CodeType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.base import plugins
from lockstep.core.modules.dtensors import is_dtensor
from lockstep.core.modules.module_trace import fingerprint
from lockstep.core.numerics.checksum import checksum

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as hooks."""
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, itertools.count)
"""Immutable values, compared by their repr()."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
LIBRARIES = ("torch", "numpy", "lockstep", "threading", "_thread", "concurrent", "logging", "multiprocessing")
"""Packages whose objects are not inspected."""
INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.dirname(os.path.dirname(torch.__file__)),
        os.path.dirname(os.__file__),
        str(plugins.ROOT),
    )
)
"""Folders of code that is not the user's."""
LARGE = 2**28
"""Bytes; larger arrays are neither copied nor compared, except for a tensor's version counter."""
MOST_VALUES = 100_000
DEPTH = 8

Undo = Callable[[], object]


@dataclass(frozen=True)
class Mark:
    root: str
    """The attribute or global that holds the value."""
    owner: Any
    """The module, class or function that it belongs to."""
    kind: str
    text: str


class Snapshot:
    """Hidden state of a model at one moment, and how to restore it.

    Tensors, arrays, numbers, containers, generators and plain objects are compared by value; others by identity.
    Without `is_kept` it makes no copies, and cannot restore.
    """

    def __init__(self, model: nn.Module, *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.marks: dict[str, Mark] = {}
        self._undo: list[Undo] = []
        self._visited = {id(t) for t in (*model.parameters(), *model.buffers())} | {id(m) for m in model.modules()}
        self._references: list[Any] = []
        """Keep visited objects alive, so that no other gets the id of one."""
        self._functions: list[FunctionType] = []
        for name, module in model.named_modules():
            self._attributes(module, name, module)
        classes = {c: m for m in model.modules() for c in type(m).__mro__ if c.__module__.split(".")[0] != "torch"}
        for kind in classes:
            self._class(kind)
        self._globals()

    def restore(self) -> None:
        """Restore all values whose former state is known."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()

    def _attributes(self, module: nn.Module, name: str, owner: Any) -> None:
        own = {key: value for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES}
        self._undo.append(partial(_restore_dict, vars(module), own, spared=MODULE_ATTRIBUTES))
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
        """Visit the globals and closures of every function that is reached, by name, from those of the model."""
        seen: set[tuple[int, str]] = set()
        for function in self._functions:  # which grows meanwhile
            namespace = function.__globals__
            for name in _names(function.__code__):
                if (id(namespace), name) in seen or name.startswith("__"):
                    continue
                seen.add((id(namespace), name))
                if name in namespace:
                    self._undo.append(partial(namespace.__setitem__, name, namespace[name]))
                    self._visit(name, namespace[name], root=name, owner=function)
                else:
                    self._undo.append(partial(namespace.pop, name, None))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                value = cell.cell_contents
                root = f"{name} of {function.__qualname__}"
                self._undo.append(partial(setattr, cell, "cell_contents", value))
                self._visit(root, value, root=root, owner=function)

    def _visit(self, path: str, value: Any, *, root: str, owner: Any, depth: int = 0) -> None:
        if isinstance(value, FunctionType | MethodType):
            self._function(value.__func__ if isinstance(value, MethodType) else value)
            return
        if id(value) in self._visited or depth > DEPTH or len(self.marks) > MOST_VALUES or is_opaque(value):
            return
        if not isinstance(value, PLAIN):
            self._visited.add(id(value))
            self._references.append(value)
        self.marks[path] = Mark(root, owner, type(value).__name__, summary(value))
        visit = partial(self._visit, root=root, owner=owner, depth=depth + 1)
        if isinstance(value, nn.Module):
            self._attributes(value, path, owner)
            for key, child in (*value._buffers.items(), *value._modules.items()):
                visit(f"{path}.{key}", child)
        elif self.is_kept and (undo := undo_of(value)) is not None:
            self._undo.append(undo)
        for key, child in children(value):
            visit(f"{path}{key}", child)


def changed(before: Snapshot, after: Snapshot) -> dict[str, Mark]:
    """Return the values that differ between two snapshots, by attribute or global."""
    differences: dict[str, Mark] = {}
    for path in [*before.marks, *after.marks]:
        one, other = before.marks.get(path), after.marks.get(path)
        mark = other or one
        assert mark is not None
        if one is None or other is None or one.text != other.text:
            differences.setdefault(mark.root, mark)
    return differences


def is_own(thing: Any) -> bool:
    """Return whether a class or function is from a user's file, not from an installed package."""
    if isinstance(thing, FunctionType):
        return not _is_installed(thing.__code__.co_filename)
    functions = [value for value in vars(thing).values() if isinstance(value, FunctionType)]
    return bool(functions) and is_own(functions[0])


@cache
def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(INSTALLED)


def is_opaque(value: Any) -> bool:
    """Return whether a value is not inspected: parameters, code, types, and objects of libraries."""
    if isinstance(value, nn.Parameter) or is_dtensor(value):
        return True
    if isinstance(value, (Tensor, nn.Module, np.ndarray, np.generic, *GENERATORS, *PLAIN)):
        return False
    if isinstance(value, type | GenericAlias | ModuleType | CodeType | partial):
        return True
    return type(value).__module__.split(".")[0] in LIBRARIES


def summary(value: Any) -> str:
    """Return a text that differs where the value does; of a container only its type and length."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value._version}" if _is_large(value) else str(checksum(value).item())
    if isinstance(value, np.ndarray | np.generic):
        return str(value.shape) if value.nbytes > LARGE or value.dtype.hasobject else fingerprint(np.asarray(value))
    if (access := _generator_access(value)) is not None:
        return fingerprint(access[0]())
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, CONTAINERS) else type(value).__name__


def undo_of(value: Any) -> Undo | None:
    """Return a function that restores a mutable value; None where nothing can."""
    if isinstance(value, Tensor):
        if value.requires_grad or _is_large(value):
            return None
        return partial(_restore_tensor, value, value.detach().clone(), summary(value))
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy()) if value.nbytes <= LARGE and value.flags.writeable else None
    if isinstance(value, GENERATORS):
        access = _generator_access(value)
        return None if access is None else partial(access[1], access[0]())
    if isinstance(value, dict):
        return partial(_restore_dict, value, dict(value))
    if isinstance(value, list | set | deque):
        return partial(_restore_items, value, list(value))
    if not isinstance(value, tuple | frozenset) and hasattr(value, "__dict__"):
        return partial(_restore_dict, vars(value), dict(vars(value)))
    return None


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a container or an object, each with the expression by which it is reached."""
    if isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", child) for key, child in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", child) for number, child in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "{}", sorted(map(repr, value))
    elif not isinstance(value, nn.Module | Tensor | random.Random) and hasattr(value, "__dict__"):
        yield from ((f".{key}", child) for key, child in vars(value).items())


def _is_large(tensor: Tensor) -> bool:
    return tensor.is_meta or tensor.numel() * tensor.element_size() > LARGE


def _generator_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return the getter and setter of a random number generator's state; None for other values and without a state."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else (value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state, value.set_state
    return None


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _restore_dict(target: dict[Any, Any], values: dict[Any, Any], spared: frozenset[str] = frozenset()) -> None:
    for key in [key for key in target if key not in values and key not in spared]:
        del target[key]
    target.update(values)


def _restore_items(target: Any, values: list[Any]) -> None:
    target.clear()
    target.update(values) if isinstance(target, set) else target.extend(values)


def _restore_tensor(tensor: Tensor, before: Tensor, text: str) -> None:
    if tensor.shape != before.shape:
        tensor.data = before
    elif summary(tensor) != text:
        tensor.detach().copy_(before)
