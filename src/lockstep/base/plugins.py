"""Plugins: every file in a family's folder is one. The only module that imports by name."""

import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from lockstep.base import trust
from lockstep.base.contracts import HOOKS
from lockstep.base.errors import ConfigError, MissingExtra, nearest

CODE = "__lockstep_sha256__"
"""Attribute of an imported user module: the sha256 of its source, since an export may be replaced under a server."""
ROOT = Path(__file__).parents[1]
FAMILIES = {
    "models": "models",
    "sources": "data.sources",
    "strategies": "parallel.strategies",
    "launchers": "launch.launchers",
}
"""Title in `lockstep plugins` -> the family's folder, dotted."""


def names(family: str) -> list[str]:
    """List the plugins in a family's folder (dotted, relative to the package), sorted."""
    folder = ROOT.joinpath(*family.split("."))
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))


def find(family: str, name: str) -> Any:
    """Import the module of a plugin. Raises ConfigError, with the nearest name, where there is no such file."""
    known = names(family)
    if name not in known:
        raise ConfigError(f"there is no {name!r}{nearest(name, known)} (there is: {', '.join(known)})")
    return importlib.import_module(f"lockstep.{family}.{name}")


def implementation(family: str, name: str, part: str = "") -> Any:
    """Import the module that implements a plugin: its companion `_NAME.py` (`_NAME_PART.py`), else its own module.

    Companions contain what needs torch, so that a config can be validated without importing it.
    Raises ConfigError where there is no `_NAME_PART.py`.
    """
    settings, companion = find(family, name), f"_{name}_{part}" if part else f"_{name}"
    if part and not _has(family, companion):
        raise ConfigError(f"nothing is known of its {part}: there is no {companion}.py beside {name}.py")
    return importlib.import_module(f"lockstep.{family}.{companion}") if _has(family, companion) else settings


def implementation_name(family: str, name: str) -> str:
    """Return the name of the module that implements a plugin, without importing it."""
    return f"lockstep.{family}._{name}" if _has(family, f"_{name}") else f"lockstep.{family}.{name}"


def _has(family: str, module: str) -> bool:
    return ROOT.joinpath(*family.split("."), f"{module}.py").is_file()


def hook(family: str, name: str, function: str) -> Any:
    """Return an optional function of a plugin (see contracts.HOOKS); None where it has none."""
    assert function in HOOKS[family], f"{function} is not declared"
    return vars(implementation(family, name)).get(function)


def load_file(path: Path, setting: str) -> ModuleType:
    """Import a user's Python file from source, and let it import modules from its folder.

    Raises ConfigError, naming the setting, where there is no such file, and UntrustedCode; errors inside the file keep
    their traceback.
    """
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {path}; a relative path counts from the folder you are in")
    name = f"lockstep_user_{path.stem}"
    loader = UserCode(name, str(path))
    code = trust.admit(path, loader.source, path.parent)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path) and vars(known).get(CODE) == code:
        return known
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    vars(module)[CODE] = code
    sys.modules[name] = module
    make_importable(path.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # else the next call would find the half-initialised module
        raise
    return module


class UserCode(importlib.machinery.SourceFileLoader):
    """Executes exactly the bytes that were checked, and no .pyc that somebody may have put beside the source."""

    @cached_property
    def source(self) -> bytes:
        return Path(self.path).read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        """Check and compile the source. Raises UntrustedCode."""
        trust.admit(Path(self.path), self.source, _owner(self.path))
        return self.source_to_code(self.source, self.path)


class UserExtension(importlib.machinery.ExtensionFileLoader):
    """Loads a compiled module beside a user's file."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Check the file, and load the bytes that were checked. Raises UntrustedCode."""
        content = Path(self.path).read_bytes()
        trust.admit(Path(self.path), content, _owner(self.path))
        copy = _private_copy(content, Path(self.path).name)
        module = super().create_module(importlib.machinery.ModuleSpec(spec.name, self, origin=copy))
        module.__file__ = self.path
        return module


def _private_copy(content: bytes, name: str) -> str:
    """Write a file with this content, which nobody else can exchange before it is loaded; return its path."""
    if hasattr(os, "memfd_create"):  # it stays open: the system takes two files of one path for the same
        copy = Path(f"/proc/self/fd/{os.memfd_create(name)}")
    else:
        copy = Path(tempfile.mkdtemp(prefix="lockstep-"), name)
    copy.write_bytes(content)
    return str(copy)


_APPENDED: set[str] = set()
"""Folders of users' files in sys.path, the one of the latest file first."""


def _unload_shadowing(folder: Path) -> None:
    """Unload modules that have names of those in a folder, from another folder or with older contents."""
    stale = set()
    for name, module in list(sys.modules.items()):
        loader = getattr(module, "__loader__", None)
        if isinstance(loader, UserCode) and getattr(module, CODE, None) is None:
            own = folder / Path(loader.path).relative_to(_owner(loader.path))
            if own.is_file() and own.read_bytes() != loader.source:
                stale.add(name.partition(".")[0])
    for name in [name for name in sys.modules if name.partition(".")[0] in stale]:
        del sys.modules[name]


def make_importable(folder: Path) -> None:
    """Let a user's file import modules from its folder, after all installed ones."""
    if not trust.FOLDERS:
        sys.path_hooks.insert(0, _finder)
    if str(folder) in _APPENDED or str(folder) not in sys.path:
        _unload_shadowing(folder)
        sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
        place = next((n for n, entry in enumerate(sys.path) if entry in _APPENDED), len(sys.path))
        sys.path.insert(place, str(folder))
        _APPENDED.add(str(folder))
    if folder not in trust.FOLDERS:
        trust.FOLDERS.add(folder)
        for known in filter(_belongs_to_user, list(sys.path_importer_cache)):
            del sys.path_importer_cache[known]


def _belongs_to_user(path: str) -> bool:
    """Return whether a folder's modules belong to a user's file, and not to an environment or package below it."""
    folder = _owner(path)
    if folder not in trust.FOLDERS:
        return False
    inner = Path(path).relative_to(folder).parts
    package = sys.modules.get(inner[0]) if inner else None
    return getattr(package, "__file__", None) is None or isinstance(package.__loader__, UserCode)  # type: ignore[union-attr]


def _owner(path: str) -> Path:
    """Return the folder from which a module below it is imported, directly or in a package."""
    owners = [Path(entry) for entry in sys.path if entry and Path(path).is_relative_to(entry)]
    return max(owners, key=lambda owner: len(owner.parts), default=Path(path).parent)


def _finder(path: str) -> importlib.machinery.FileFinder:
    """Return Python's finder for a folder with our loaders; ImportError leaves the folder to Python's own."""
    if not _belongs_to_user(path) or not Path(path).is_dir():
        raise ImportError(path)
    return importlib.machinery.FileFinder(
        path,
        (UserExtension, importlib.machinery.EXTENSION_SUFFIXES),
        (UserCode, importlib.machinery.SOURCE_SUFFIXES),
    )


def require(extra: str, *modules: str, what: str) -> None:
    """Import packages that an extra installs, needed for `what`.

    Raises MissingExtra, with the command that installs them, where one cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingExtra(
                f"{what} needs packages that are not installed: pip install 'lockstep-train[{extra}]' ({error})"
            ) from None


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is a dependency of lockstep and is not installed"
    return Path(spec.origin).parent
