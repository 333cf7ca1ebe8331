"""What is called from Python: `lockstep.spawn(...)`. Importing this costs nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.notebook import spawn as spawn

__all__ = ["spawn"]


def __getattr__(name: str) -> Any:
    if name != "spawn":
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from lockstep.notebook import spawn

    return spawn
