"""What this process is at, for a thread that watches it: where it waits for other processes, and its last progress."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAVE = "the end of the last save"
"""Training may wait in it for as long as the disk takes."""
_waiting: dict[int, list[str]] = {}
"""Thread -> what it waits in, the innermost last."""
_progress = [0.0]


@contextmanager
def waiting_in(what: str) -> Iterator[None]:
    """Inside, this thread may have to wait for other processes, in `what`: 'the gradient exchange'."""
    mine = _waiting.setdefault(threading.get_ident(), [])
    mine.append(what)
    try:
        yield
    finally:
        mine.pop()


def waits(thread: int) -> str | None:
    """What a thread waits in, if anything."""
    mine = _waiting.get(thread)
    return mine[-1] if mine else None


def progress() -> None:
    """Another micro-batch, step or the like has been done."""
    _progress[0] = time.monotonic()


def seconds_without_progress() -> float:
    """Since the last call of `progress`."""
    return time.monotonic() - _progress[0]
