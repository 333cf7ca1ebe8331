"""Which code may be executed: a file is known once this user has agreed to run it; its sha256 is recorded."""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.errors import UntrustedCode
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

    @classmethod
    def of(cls, name: object, content: bytes) -> "Code":
        return cls(str(name), len(content), hashlib.sha256(content).hexdigest())

    def __str__(self) -> str:
        return f"{escape_name(self.name)} ({self.size:,} bytes, sha256 {self.digest})"


class _ProcessState:
    """What this process may execute."""

    def __init__(self) -> None:
        self.allows_all = False
        self.known: set[str] = set()
        """sha256 of code."""
        self.restricted: set[Path] = set()
        """Folders in which code has to be known; each as given and with links resolved."""


_state = _ProcessState()


def allow_all() -> None:
    """Execute any code in this process from now on, as --trust-code says."""
    _state.allows_all = True


def require_known(folder: Path) -> None:
    """Execute code below this folder only where it is known from now on: somebody else may have written it."""
    _state.restricted |= {Path(os.path.abspath(folder)), folder.resolve()}


def admit(file: Path, content: bytes) -> None:
    """Check code that is about to be executed, and remember it. Raises UntrustedCode."""
    code = Code.of(file, content)
    if _is_restricted(file) and not _state.allows_all and not is_known(code):
        raise UntrustedCode(_refusal([code]))
    remember([code])


def _is_restricted(file: Path) -> bool:
    """Whether a file is below a restricted folder, or reached from there through a link."""
    paths = (Path(os.path.abspath(file)), file.parent.resolve() / file.name, file.resolve())
    return any(path.is_relative_to(folder) for path in paths for folder in _state.restricted)


def add_known(digests: Iterable[str]) -> None:
    """Accept code with these sha256 in this process."""
    _state.known |= set(digests)


def is_known(code: Code) -> bool:
    """Whether this user has agreed to execute this code before."""
    if code.digest in _state.known:
        return True
    with suppress(OSError):
        _state.known |= {line[:64] for line in _record().read_text("utf-8", "replace").splitlines()}
    return code.digest in _state.known


def remember(codes: Iterable[Code]) -> None:
    """Make code known to this process and, where the record can be written, to later commands."""
    new = [code for code in codes if not is_known(code)]
    _state.known |= {code.digest for code in new}
    with suppress(OSError):
        if new:
            _record().parent.mkdir(parents=True, exist_ok=True)
            with _record().open("a", encoding="utf-8") as record:
                record.write("".join(f"{code.digest}  {escape_name(code.name)}\n" for code in new))


def authorize(codes: Sequence[Code], *, trusts: bool, folder: Path) -> bool:
    """Get the user's agreement, by --trust-code or on the terminal, to execute code of a folder that may be somebody
    else's. False where no agreement is needed because all of it is known.

    Raises UntrustedCode where there is no terminal to ask on, or the answer is no.
    """
    unknown = list({code.digest: code for code in codes if not is_known(code)}.values())
    if not trusts:
        if not unknown:
            _stop_imports_from(folder)
            return False
        if not (sys.stdin.isatty() and sys.stderr.isatty()) or not _ask(unknown):
            raise UntrustedCode(_refusal(unknown))
    allow_all()
    remember(unknown)
    return True


def _stop_imports_from(folder: Path) -> None:
    """Where the working folder is below `folder`: `python -m` and processes of multiprocessing would import from it."""
    working_folder = Path.cwd()
    if working_folder.is_relative_to(folder.resolve()):
        os.environ["PYTHONSAFEPATH"] = "1"
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != working_folder]


def code_with_imports(file: Path) -> list[Code]:
    """A Python file and, as far as its source shows, those it imports from its own folder; [] where it is missing."""
    codes: dict[Path, Code] = {}
    pending = [file]
    while pending:
        path = pending.pop()
        with suppress(OSError):
            if path not in codes and path.is_file():
                size = path.stat().st_size
                if size > MOST_BYTES:
                    with path.open("rb") as large:
                        codes[path] = Code(str(path), size, hashlib.file_digest(large, "sha256").hexdigest())
                    continue
                content = path.read_bytes()
                codes[path] = Code.of(path, content)
                pending += _imported_files(file.parent, path.parent, content)
    return list(codes.values())


def _imported_files(folder: Path, package: Path, content: bytes) -> Iterator[Path]:
    """Yield files that source code may import: by absolute name from `folder`, by relative name from `package`."""
    try:
        nodes = [*ast.walk(ast.parse(content))]
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # reported when it is executed
        return
    wanted = {(folder, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = package.joinpath(*[".."] * (node.level - 1)).resolve() if node.level else folder
            names = {node.module or "", *(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)}
            wanted |= {(base, name) for name in names}
    for base, name in wanted:
        parts = name.split(".")
        is_installed = parts[0] in sys.stdlib_module_names or parts[0] in sys.modules
        if base == folder and is_installed:  # the folder is searched last
            continue
        for depth in range(1, len(parts) + 1):
            module = base.joinpath(*parts[:depth])
            yield module / "__init__.py"
            yield from (module.with_name(f"{module.name}{suffix}") for suffix in MODULES if module.name)


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
    """Where this user's records are kept."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "lockstep"


def _record() -> Path:
    """The file with a line for each known file of code: its sha256 and path."""
    return state_folder() / "trusted"
