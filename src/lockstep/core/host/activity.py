"""What this process does, for the watchdog thread: which collective it waits in, and when it last made progress."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.core.host.phases import phase

SAVE = "the end of the last save"
"""No hang: training waits for the disk."""
_waiting: dict[int, list[str]] = {}
"""Thread -> what it waits in, the innermost last."""
_progress = [0.0]


@contextmanager
def waiting_in(what: str) -> Iterator[None]:
    """Mark a block in which this thread may wait for other processes, such as 'the gradient exchange', or for SAVE."""
    stack = _waiting.setdefault(threading.get_ident(), [])
    stack.append(what)
    try:
        with phase("saving" if what == SAVE else "exchange"):
            yield
    finally:
        stack.pop()


def waits(thread: int) -> str | None:
    """What a thread waits in, if anything."""
    stack = _waiting.get(thread)
    return stack[-1] if stack else None


def progress() -> None:
    """Record that a micro-batch, a step or the like is done."""
    _progress[0] = time.monotonic()


def seconds_without_progress() -> float:
    """Seconds since the last call of `progress`."""
    return time.monotonic() - _progress[0]
