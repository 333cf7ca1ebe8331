"""Whose code it is: a file of code is this user's own once it was run on this user's word; its sha256 is kept."""

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
from lockstep.base.escaping import named

OPTION = "--trust-code"
KNOWN = "--known-code"
"""With the sha256 of what a launcher has found to be known: another machine may have another record."""
MODULES = (".py", str(sysconfig.get_config_var("EXT_SUFFIX")), ".abi3.so", ".so", ".pyd")
"""How files end that an import may execute."""
MOST_BYTES = 32 << 20
"""Of a file of code in which imports are looked for."""


@dataclass(frozen=True)
class Code:
    """Something that would be executed: a file of code, or settings that name programs and variables."""

    name: str
    size: int
    """In bytes."""
    digest: str
    """sha256."""

    @classmethod
    def of(cls, name: object, content: bytes) -> "Code":
        """That of these bytes."""
        return cls(str(name), len(content), hashlib.sha256(content).hexdigest())

    def __str__(self) -> str:
        return f"{named(self.name)} ({self.size:,} bytes, sha256 {self.digest})"


class _Standing:
    """What this process knows of code."""

    def __init__(self) -> None:
        self.allows_all = False
        self.known: set[str] = set()
        self.foreign: set[Path] = set()
        """Folders, as they are called and where they really are."""


_standing = _Standing()


def allow() -> None:
    """Execute whatever is asked for from now on, in this process: what --trust-code says."""
    _standing.allows_all = True


def guard(folder: Path) -> None:
    """From now on code below this folder is executed only where it is known: somebody else may have written it."""
    _standing.foreign |= {Path(os.path.abspath(folder)), folder.resolve()}


def is_allowed() -> bool:
    """Whether this process executes whatever is asked for."""
    return _standing.allows_all


def admit(file: Path, content: bytes) -> None:
    """Let a file's code, about to be executed, pass, and know it from now on. Raises UntrustedCode."""
    code = Code.of(file, content)
    if _is_foreign(file) and not _standing.allows_all and not is_known(code):
        raise UntrustedCode(_refusal([code]))
    remember([code])


def _is_foreign(file: Path) -> bool:
    """Whether it lies below a guarded folder, or is reached by a link from there."""
    names = (Path(os.path.abspath(file)), file.parent.resolve() / file.name, file.resolve())
    return any(name.is_relative_to(folder) for name in names for folder in _standing.foreign)


def know(digests: Iterable[str]) -> None:
    """Let code with these sha256 pass in this process."""
    _standing.known |= set(digests)


def is_known(code: Code) -> bool:
    """Whether this user has had it executed before."""
    if code.digest in _standing.known:
        return True
    with suppress(OSError):
        _standing.known |= {line[:64] for line in _record().read_text("utf-8", "replace").splitlines()}
    return code.digest in _standing.known


def remember(codes: Iterable[Code]) -> None:
    """Know it from now on, also in other commands where the record can be written."""
    new = [code for code in codes if not is_known(code)]
    _standing.known |= {code.digest for code in new}
    with suppress(OSError):
        if new:
            _record().parent.mkdir(parents=True, exist_ok=True)
            with _record().open("a", encoding="utf-8") as record:
                record.write("".join(f"{code.digest}  {named(code.name)}\n" for code in new))


def settle(codes: Sequence[Code], *, trusts: bool, of: Path) -> bool:
    """Whether the user says, by --trust-code or on a terminal, that all of this of somebody's folder may be executed;
    False where there is nothing to say, as all of it is known.

    Raises UntrustedCode where there is nobody to ask, or the answer is no.
    """
    unknown = list({code.digest: code for code in codes if not is_known(code)}.values())
    if not trusts:
        if not unknown:
            _import_nothing_from(of)
            return False
        if not (sys.stdin.isatty() and sys.stderr.isatty()) or not _agreed(unknown):
            raise UntrustedCode(_refusal(unknown))
    allow()
    remember(unknown)
    return True


def _import_nothing_from(folder: Path) -> None:
    """Where the user stands in the folder: `python -m` and what multiprocessing starts would import from there."""
    here = Path.cwd()
    if here.is_relative_to(folder.resolve()):
        os.environ["PYTHONSAFEPATH"] = "1"
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]


def of_file(file: Path) -> list[Code]:
    """A Python file, and what lies beside it that it imports, as far as its text tells; [] where there is none."""
    found: dict[Path, Code] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        with suppress(OSError):
            if path not in found and path.is_file():
                size = path.stat().st_size
                if size > MOST_BYTES:
                    with path.open("rb") as large:
                        found[path] = Code(str(path), size, hashlib.file_digest(large, "sha256").hexdigest())
                    continue
                content = path.read_bytes()
                found[path] = Code.of(path, content)
                waiting += _beside(file.parent, path.parent, content)
    return list(found.values())


def _beside(folder: Path, package: Path, content: bytes) -> Iterator[Path]:
    """Files in a folder that are imported by name, and in that of a package by a name that begins with a dot."""
    try:
        nodes = [*ast.walk(ast.parse(content))]
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # to be told when it is executed
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
            place = base.joinpath(*parts[:depth])
            yield place / "__init__.py"
            yield from (place.with_name(f"{place.name}{ending}") for ending in MODULES if place.name)


def _agreed(codes: Sequence[Code]) -> bool:
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


def _record() -> Path:
    """A line for each file: sha256 and where it was."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "lockstep" / "trusted"
