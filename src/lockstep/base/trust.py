"""Permission to execute code: a file is known once this user has agreed to run it; its sha256 is recorded."""

import ast
import hashlib
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lockstep.base.errors import ModelError, UntrustedCode
from lockstep.base.escaping_console import escape_name

OPTION = "--trust-code"
KNOWN = "--known-code"
"""Option of a worker, with the sha256 of code known to the launcher: another machine may have another record."""
MODULES = (".py", str(sysconfig.get_config_var("EXT_SUFFIX")), ".abi3.so", ".so", ".pyd")
"""Suffixes of files that an import can execute."""
MOST_BYTES = 32 << 20
"""Larger files of code are not searched for imports."""


@dataclass(frozen=True)
class Code:
    """Something to be executed: a file of code, or settings that name programs and environment variables."""

    name: str
    size: int
    """Bytes."""
    digest: str
    """sha256."""
    folder: Path | None = None
    """Folder from which it is imported, and its own imports too."""

    @classmethod
    def of(cls, name: object, content: bytes, folder: Path | None = None) -> "Code":
        return cls(str(name), len(content), hashlib.sha256(content).hexdigest(), folder)

    def __str__(self) -> str:
        return f"{escape_name(self.name)} ({self.size:,} bytes, sha256 {self.digest})"


class _ProcessState:
    """Permissions of this process to execute code."""

    def __init__(self) -> None:
        self.allows_all = False
        self.known: set[str] = set()
        """sha256 of code."""
        self.folders: set[str] = set()
        """Folders whose code is allowed: of the user's own files, and of those that --trust-code is for."""
        self.arguments: tuple[str, ...] = ()


_state = _ProcessState()
FOLDERS: set[Path] = set()
"""Folders of users' files that this process has imported, from which these import others."""


def accept(arguments: Sequence[str]) -> None:
    """Allow in this process what the process that started it was allowed; `arguments` come from there."""
    _state.allows_all |= OPTION in arguments
    if KNOWN in arguments:
        _state.known |= set(arguments[arguments.index(KNOWN) + 1].split(","))


def arguments() -> tuple[str, ...]:
    """Return the arguments by which worker processes learn what this process was last allowed."""
    return _state.arguments


def admit(file: Path, content: bytes, folder: Path) -> str:
    """Check code that is about to be executed, imported from `folder`, and remember it -> its sha256. Raises
    UntrustedCode."""
    code = Code.of(file, content)
    if not (_state.allows_all or os.path.abspath(folder) in _state.folders or is_known(code)):
        raise UntrustedCode(_refusal([code]))
    remember([code])
    return code.digest


def is_known(code: Code) -> bool:
    """Return whether this user has agreed to execute this code before."""
    if code.digest not in _state.known:
        with suppress(OSError), _record() as record:
            _state.known |= {line[:64] for line in record}
    return code.digest in _state.known


def remember(codes: Iterable[Code]) -> None:
    """Make code known to this process and, where the record can be written, to later commands."""
    new = [code for code in codes if not is_known(code)]
    _state.known |= {code.digest for code in new}
    with suppress(OSError):
        if new:
            with _record(writes=True) as record:
                record.write("".join(f"{code.digest}  {escape_name(code.name)}\n" for code in new))


def own(codes: Sequence[Code]) -> tuple[str, ...]:
    """Allow this user's own code, with what it imports from its folders while it runs -> `arguments()`."""
    remember(codes)
    _state.folders |= {os.path.abspath(code.folder) for code in codes if code.folder is not None}
    _state.arguments = (OPTION,) if codes else ()
    return _state.arguments


def authorize(codes: Sequence[Code], *, trusts: bool, folder: Path, asks: bool = True) -> tuple[str, ...]:
    """Get the user's agreement, by --trust-code or on the terminal, to execute code of a folder that may be somebody
    else's -> `arguments()`. An answer on the terminal allows the bytes that were shown, and nothing else.

    Raises UntrustedCode where there is no terminal to ask on, or the answer is no. Without `asks`, nothing is allowed.
    """
    _stop_imports_from(folder)
    if trusts:
        return own(codes)
    unknown = list({code.digest: code for code in codes if not is_known(code)}.values())
    if unknown and asks:
        if not (sys.stdin.isatty() and sys.stderr.isatty()) or not _ask(unknown):
            raise UntrustedCode(_refusal(unknown))
        remember(unknown)
    _state.arguments = (KNOWN, ",".join(dict.fromkeys(code.digest for code in codes if is_known(code))) or "none")
    return _state.arguments


def _stop_imports_from(folder: Path) -> None:
    """Stop `python -m` and processes of multiprocessing from importing from a working folder below `folder`."""
    working_folder = Path.cwd()
    if working_folder.is_relative_to(folder.resolve()):
        os.environ["PYTHONSAFEPATH"] = "1"
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != working_folder]


def code_with_imports(file: Path) -> list[Code]:
    """List a Python file and those that its source imports from its own folder; [] where it is missing."""
    codes: dict[Path, Code] = {}
    pending = [file]
    while pending:
        path = pending.pop()
        with suppress(OSError):
            if path not in codes and path.is_file():
                size = path.stat().st_size
                if size > MOST_BYTES:
                    with path.open("rb") as large:
                        digest = hashlib.file_digest(large, "sha256").hexdigest()
                    codes[path] = Code(str(path), size, digest, file.parent)
                    continue
                content = path.read_bytes()
                codes[path] = Code.of(path, content, file.parent)
                pending += _imported_files(file.parent, path.parent, content)
    return list(codes.values())


def copy_with_imports(file: Path, folder: Path) -> None:
    """Copy a user's file, and what it imports from its own folder, into another. Raises ModelError for code outside."""
    for code in code_with_imports(file):
        place = os.path.relpath(code.name, file.parent)
        if place.startswith(os.pardir):
            raise ModelError(f"{file} imports {code.name}, which does not lie below its folder: move it there")
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(code.name, folder / place)


def _imported_files(folder: Path, package: Path, content: bytes) -> Iterator[Path]:
    """Yield files that source code may import: by absolute name from `folder`, by relative name from `package`."""
    try:
        nodes = [*ast.walk(ast.parse(content))]
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # reported when it is executed
        return
    wanted = {(folder, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = Path(os.path.normpath(package.joinpath(*[".."] * (node.level - 1)))) if node.level else folder
            names = {node.module or "", *(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)}
            wanted |= {(base, name) for name in names}
    for base, name in wanted:
        parts = name.split(".")
        if base == folder and _is_installed(parts[0], folder):  # the folder is searched last
            continue
        for depth in range(1, len(parts) + 1):
            module = base.joinpath(*parts[:depth])
            yield module / "__init__.py"
            yield from (module.with_name(f"{module.name}{suffix}") for suffix in MODULES if module.name)


def _is_installed(name: str, folder: Path) -> bool:
    """Return whether an import of this name, by a user's file in a folder, finds a module that is no user's."""
    module, own = sys.modules.get(name), {folder, *FOLDERS}
    origins = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    is_own = any(Path(origin).is_relative_to(each) for origin in origins for each in own)
    return name in sys.stdlib_module_names or (module is not None and not is_own)


def _ask(codes: Sequence[Code]) -> bool:
    sys.stderr.write("This would execute code that you have not run before:\n")
    sys.stderr.write("".join(f"  {code}\n" for code in codes))
    sys.stderr.write("Execute it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _refusal(codes: Sequence[Code]) -> str:
    if len(codes) == 1:
        return f"{codes[0]} is code that this user has not run before: read it, then add {OPTION}"
    listing = "".join(f"\n  {code}" for code in codes)
    return f"this would execute code that this user has not run before: read it, then add {OPTION}{listing}"


def state_folder() -> Path:
    """Return the folder of this user's records."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "lockstep"


def _record(*, writes: bool = False) -> TextIO:
    """Open the file with a line for each known file of code: its sha256 and path. Raises OSError, also where somebody
    else could have written it; with `writes`, such a file is replaced where this user owns its folder."""
    folder = state_folder()
    file, flags = folder / "trusted", os.O_RDONLY
    if writes:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        for each in (*reversed(folder.parents), folder):  # mkdir(parents=True) gives its mode to the last one only
            if not each.is_dir():
                each.mkdir(mode=0o700)
        if not _is_private(folder.stat()):
            folder.chmod(0o700)  # which only its owner may
            file.unlink(missing_ok=True)
        if os.path.lexists(file) and not _is_private(file.lstat()):
            file.unlink()
    handle = os.open(file, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
    record = open(handle, "a" if writes else "r", encoding="utf-8", errors="replace")  # noqa: SIM115 (the caller's)
    if not (_is_private(folder.stat()) and _is_private(os.fstat(handle))):
        record.close()
        raise PermissionError(f"{file} may have been written by somebody else")
    return record


def _is_private(found: os.stat_result) -> bool:
    """Return whether only this user can write to a file or folder."""
    return os.name == "nt" or (found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
