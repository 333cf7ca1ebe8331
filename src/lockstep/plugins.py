"""A plugin is a file: the folder listing is the registry, and the only place that imports by name."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import ConfigError, MissingExtra, nearest

CODE = "__lockstep_sha256__"
"""Of a user's file, as it was when it was imported: an export may be replaced under a running server."""
ROOT = Path(__file__).parent
FAMILIES = {"models": "models", "sources": "data.sources", "strategies": "parallel", "launchers": "launch"}
"""What `lockstep plugins` calls a family -> its folder, dotted."""


def names(family: str) -> list[str]:
    """Names of the plugins in a family's folder (dotted, below the package), sorted."""
    folder = ROOT.joinpath(*family.split("."))
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))


def find(family: str, name: str) -> Any:
    """The module `name` of a family; raises ConfigError with the nearest name when there is no such file."""
    known = names(family)
    if name not in known:
        raise ConfigError(f"there is no {name!r}{nearest(name, known)} (there is: {', '.join(known)})")
    return importlib.import_module(f"lockstep.{family}.{name}")


def load_file(path: Path) -> ModuleType:
    """Import a user's Python file as a module, with its folder importable beside it.

    Raises ConfigError when the file does not exist; errors inside the file keep their own traceback.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: name a Python file, relative to the folder you are in")
    name = f"lockstep_user_{path.stem}"
    code = hashlib.sha256(path.read_bytes()).hexdigest()
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path) and vars(known).get(CODE) == code:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    vars(module)[CODE] = code
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # else the next call would find half a module and call it whole
        raise
    return module


def require(extra: str, *modules: str, what: str) -> None:
    """Import packages that only one of the extras installs, before `what` begins.

    Raises MissingExtra, with the command that installs it, when one of them is missing or cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingExtra(
                f"{what} needs packages that are not installed: pip install 'lockstep-train[{extra}]' ({error})"
            ) from None


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is a dependency of lockstep and is not installed"
    return Path(spec.origin).parent
