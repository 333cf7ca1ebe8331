"""Parameters chosen by the patterns of a setting, such as model.freeze."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BeforeValidator

from lockstep.base.errors import ConfigError, nearest


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
"""One pattern or a list of them."""


def matching(patterns: Sequence[str], names: Sequence[str], *, setting: str, noun: str = "parameter") -> set[str]:
    """Return the names of parameters, or of what `noun` says, that match a pattern or lie in a module that matches.

    Patterns are those of a shell; `*` also matches dots. A first part that all names share, such as "network.", may be
    left out, and where a pattern matches no whole name, also the first part of a name: "encoder" for "bert.encoder".
    Raises ConfigError, with the nearest name, for a pattern that matches nothing.
    """
    first = {name.partition(".")[0] for name in names}
    shared = f"{first.pop()}." if len(first) == 1 else ""
    aliases = {name: _aliases(name, shared) for name in names}
    inner = {name: name.removeprefix(shared).partition(".")[2] for name in names}
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name, known in aliases.items() if any(fnmatchcase(alias, pattern) for alias in known)}
        own = own or {name for name in names if any(fnmatchcase(each, pattern) for each in _prefixes(inner[name]))}
        if not own:
            problem = _describe_unmatched(pattern, [a[0] for a in aliases.values()], aliases.values())
            raise ConfigError(f"{setting}: {problem.replace('parameter', noun)}")
        found |= own
    return found


def _describe_unmatched(pattern: str, names: Sequence[str], aliases: Any) -> str:
    parts = [part for name in names for part in name.split(".") if not part.isdigit()]
    known = list(dict.fromkeys([*(alias for each in aliases for alias in each), *parts]))
    some = ", ".join([*names[:3], *["..."] * (len(names) > 3)])
    return f"{pattern!r} matches no parameter or module of the model{nearest(pattern, known)} (its parameters: {some})"


def _aliases(name: str, shared: str) -> list[str]:
    """List the name and those of the modules that it lies in, each without and with the shared part."""
    short = name.removeprefix(shared)
    return [*_prefixes(short), *(f"{shared}{each}" for each in _prefixes(short) if shared)]


def _prefixes(name: str) -> Iterator[str]:
    """Yield a.b.c, a.b and a for a.b.c."""
    while name:
        yield name
        name = name.rpartition(".")[0]
