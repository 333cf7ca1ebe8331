"""Defers the import of torch's compiler, which training without `torch.compile` never uses.

DDP, FSDP and every optimizer import `torch._dynamo` only to exclude themselves from it (torch 2.13: torch/_compile.py,
torch/optim/optimizer.py, torch/nn/parallel/distributed.py), and transformers to mark some functions, which takes a
second, a fourth of the time to the first step. `install` puts a module in its place that answers these calls, and
becomes the real one as soon as anything else is asked of it.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
FSDP_HOOKS = "skipping FSDP hooks"
"""FSDP's reason for what it excludes, anew for every call."""
MARKING = "transformers."
"""Package of functions that are excluded when they are defined, and which no training compiles."""
ALONE = "_trace_wrapped_higher_order_op"
"""Submodule that needs nothing of the package, and that transformers imports."""


def install() -> None:
    """Defer `torch._dynamo`, unless it is imported already."""
    if NAME not in sys.modules and (spec := importlib.util.find_spec(NAME)):
        sys.modules[NAME] = vars(torch)["_dynamo"] = DeferredDynamo(spec)
        sys.meta_path.insert(0, SubmoduleFinder())


class DeferredDynamo(ModuleType):
    """Stands for `torch._dynamo`: nothing is compiled, so nothing has to be excluded from it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(NAME)
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, spec.submodule_search_locations or []
        self.excluded: list[Any] = []
        """Functions that torch excluded; each keeps the answer."""
        self.marks: list[Callable[[ModuleType], object]] = []
        """Calls that mark functions, to be repeated with the real module."""
        self.utils = DeferredSubmodule("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # its default
        self.trace_rules = DeferredSubmodule("trace_rules", clear_lru_cache=lambda: None)

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is no graph, unless the real module was imported since."""
        if is_imported():
            imported().graph_break(*args, **options)

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch's or transformers as it is; a user's may be called while something compiles."""
        if fn is None and (*args, options.get("recursive"))[0] is False:  # no context manager, as otherwise
            return lambda later: self.disable(later, *args, **options)
        is_lazy, is_marked = not options.get("wrapping", True), str(getattr(fn, "__module__", "")).startswith(MARKING)
        if is_imported() or not (is_lazy or is_marked or options.get("reason") == FSDP_HOOKS):
            return imported().disable(fn, *args, **options)
        if is_lazy:
            self.excluded.append(fn)
        elif is_marked:
            self.marks.append(lambda real: real.decorators.skip(fn))
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Return the function, and register the call, to be repeated with the real module."""
        if is_imported():
            return imported().allow_in_graph(fn)
        self.marks.append(lambda real: real.allow_in_graph(fn))
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        """Mark the function, which is all that the real one does."""
        fn._dynamo_marked_constant = True
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as `inspect` asks every module
            raise AttributeError(name)
        return getattr(imported(), name)


class DeferredSubmodule:
    """Stands for a module of `torch._dynamo`: answers what DDP and process groups ask."""

    def __init__(self, name: str, **known: Callable[[], Any]) -> None:
        self._name, self._known = name, known

    def __getattr__(self, name: str) -> Any:
        if name in self._known and not is_imported():
            return self._known[name]
        return getattr(getattr(imported(), self._name), name)


def is_imported() -> bool:
    return not isinstance(sys.modules.get(NAME), DeferredDynamo)


def imported() -> ModuleType:
    """Import the real `torch._dynamo`; what was excluded before is excluded again at its next call."""
    deferred = sys.modules.get(NAME)
    if isinstance(deferred, DeferredDynamo):
        del sys.modules[NAME], vars(torch)["_dynamo"]
        for function in deferred.excluded:
            vars(function).pop("__dynamo_disable", None)
        real = importlib.import_module(NAME)
        for mark in deferred.marks:
            mark(real)
        if ALONE in vars(deferred):
            setattr(real, ALONE, vars(deferred)[ALONE])
    return importlib.import_module(NAME)


class SubmoduleFinder(MetaPathFinder):
    """Imports the real package before any of its submodules but one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith(f"{NAME}.") and isinstance(sys.modules.get(NAME), DeferredDynamo):
            if name == f"{NAME}.{ALONE}":
                return importlib.machinery.PathFinder.find_spec(name, path)
            package = imported()
            if name not in sys.modules:
                return importlib.machinery.PathFinder.find_spec(name, package.__path__)
            return ModuleSpec(name, Existing())
        return None


class Existing(Loader):
    """Loads a module that has just been imported."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed."""
