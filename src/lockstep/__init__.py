"""What is called from Python: `lockstep.spawn(...)`. Importing this costs nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.notebook import spawn as spawn

    __version__: str

__all__ = ["__version__", "spawn"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lockstep-train")
    if name != "spawn":
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from lockstep.notebook import spawn

    return spawn


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
