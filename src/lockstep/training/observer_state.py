"""What observers of the user's remember, kept in checkpoints: those with state_dict() and load_state_dict(state)."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.base.events import Observer


def states(observers: Sequence[Observer], warn: Callable[[str], None]) -> list[Any]:
    """The state of each observer, None where it has none, or one that JSON cannot hold."""
    return [_state(observer, warn) for observer in observers]


def _state(observer: Observer, warn: Callable[[str], None]) -> Any:
    if not hasattr(observer, "state_dict"):
        return None
    try:
        return json.loads(json.dumps(observer.state_dict(), allow_nan=False))
    except Exception as error:
        warn(f"the state of the observer {type(observer).__name__} is not saved: {type(error).__name__}: {error}")
        return None


def restore(observers: Sequence[Observer], saved: Sequence[Any], warn: Callable[[str], None]) -> None:
    """Hand each observer the state that was saved for the one at its place."""
    for observer, state in zip(observers, saved, strict=False):
        if state is None or not hasattr(observer, "load_state_dict"):
            continue
        try:
            observer.load_state_dict(state)
        except Exception as error:
            name = type(observer).__name__
            warn(f"the observer {name} goes on without its saved state: {type(error).__name__}: {error}")
