"""Defers imports that training does not need: torch's compiler without `torch.compile`, and `scipy.optimize`.

DDP, FSDP and every optimizer import `torch._dynamo` only to exclude themselves from it (torch 2.13: torch/_compile.py,
torch/optim/optimizer.py, torch/nn/parallel/distributed.py), and transformers to mark some functions, which takes a
second, a fourth of the time to the first step; all losses of transformers import those for detection, which name one
function of `scipy.optimize`: half a second. After `install`, these packages are modules that answer such calls, and
become the real ones as soon as anything else is asked of them.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FSDP_HOOKS = "skipping FSDP hooks"
"""FSDP's reason for what it excludes, anew for every call."""
MARKING = "transformers."
"""Package of functions that are excluded when they are defined, and which no training compiles."""
ALONE = "_trace_wrapped_higher_order_op"
"""Submodule of `torch._dynamo` that needs nothing of the package, and that transformers imports."""


def install() -> None:
    """Defer the packages that are not imported yet."""
    if not any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeferringFinder())


class DeferredModule(ModuleType):
    """Stands for a package until something is asked that needs it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__path__ = spec.submodule_search_locations or []

    def is_imported(self) -> bool:
        return sys.modules.get(self.__name__) is not self

    def imported(self) -> ModuleType:
        """Return the real package; import it if it is not yet."""
        if not self.is_imported():
            parent, _, name = self.__name__.rpartition(".")
            del sys.modules[self.__name__]
            vars(sys.modules[parent]).pop(name, None)
            self.hand_over(import_module(self.__name__))
        return import_module(self.__name__)

    def hand_over(self, real: ModuleType) -> None:
        """Repeat with the real package the calls that this one answered."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as `inspect` asks every module
            raise AttributeError(name)
        return getattr(self.imported(), name)


class DeferredDynamo(DeferredModule):
    """Stands for `torch._dynamo`: nothing is compiled, so nothing has to be excluded from it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec)
        self.excluded: list[Any] = []
        """Functions that torch excluded; each keeps the answer."""
        self.marks: list[Callable[[ModuleType], object]] = []
        """Calls that mark functions, to be repeated with the real module."""
        self.utils = DeferredSubmodule(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # its default
        self.trace_rules = DeferredSubmodule(self, "trace_rules", clear_lru_cache=lambda: None)

    def hand_over(self, real: ModuleType) -> None:
        """Have what was excluded before excluded again at its next call, and repeat the marks."""
        for function in self.excluded:
            vars(function).pop("__dynamo_disable", None)
        for mark in self.marks:
            mark(real)
        if ALONE in vars(self):
            setattr(real, ALONE, vars(self)[ALONE])

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is no graph, unless the real module was imported since."""
        if self.is_imported():
            self.imported().graph_break(*args, **options)

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch's or transformers as it is; a user's may be called while something compiles."""
        if fn is None and (*args, options.get("recursive"))[0] is False:  # no context manager, as otherwise
            return lambda later: self.disable(later, *args, **options)
        is_lazy, is_marked = not options.get("wrapping", True), str(getattr(fn, "__module__", "")).startswith(MARKING)
        if self.is_imported() or not (is_lazy or is_marked or options.get("reason") == FSDP_HOOKS):
            return self.imported().disable(fn, *args, **options)
        if is_lazy:
            self.excluded.append(fn)
        elif is_marked:
            self.marks.append(lambda real: real.decorators.skip(fn))
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Return the function, and register the call, to be repeated with the real module."""
        if self.is_imported():
            return self.imported().allow_in_graph(fn)
        self.marks.append(lambda real: real.allow_in_graph(fn))
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        """Mark the function, which is all that the real one does."""
        fn._dynamo_marked_constant = True
        return fn


class DeferredSubmodule:
    """Stands for a module of `torch._dynamo`: answers what DDP and process groups ask."""

    def __init__(self, package: DeferredDynamo, name: str, **known: Callable[[], Any]) -> None:
        self._package, self._name, self._known = package, name, known

    def __getattr__(self, name: str) -> Any:
        if name in self._known and not self._package.is_imported():
            return self._known[name]
        return getattr(getattr(self._package.imported(), self._name), name)


class DeferredOptimize(DeferredModule):
    """Stands for `scipy.optimize`: has the function that transformers names when it is imported."""

    def linear_sum_assignment(self, *args: Any, **options: Any) -> Any:
        return self.imported().linear_sum_assignment(*args, **options)


class DeferringFinder(MetaPathFinder):
    """Defers packages at their first import; imports the real one before any of its submodules but one."""

    def __init__(self) -> None:
        self.kinds: dict[str, type[DeferredModule]] = {
            "torch._dynamo": DeferredDynamo,
            "scipy.optimize": DeferredOptimize,
        }

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if (kind := self.kinds.pop(name, None)) and (spec := PathFinder.find_spec(name, path)):
            return ModuleSpec(name, Existing(kind(spec)), origin=spec.origin, is_package=True)
        package, _, child = name.rpartition(".")
        if not isinstance(deferred := sys.modules.get(package), DeferredModule) or child == ALONE:
            return None
        real = deferred.imported()
        if name in sys.modules:
            return ModuleSpec(name, Existing(sys.modules[name]))
        return PathFinder.find_spec(name, real.__path__)


class Existing(Loader):
    """Loads a module that exists."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed."""
