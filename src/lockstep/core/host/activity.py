"""Activity of this process, for the watchdog thread: the collective it waits in, and the time of its last progress."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.core.host.phases import phase

SAVE = "the end of the last save"
"""A wait for the disk, which is no hang."""
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/nn/parallel/distributed.py")
"""Files of torch: a thread whose innermost line is in one waits in native code for other processes."""
GRADIENTS = "gradients"
_waiting: dict[int, list[str]] = {}
"""Thread -> names of what it waits in, the innermost last."""
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
    """Return the name of what a thread waits in, if anything."""
    stack = _waiting.get(thread)
    return stack[-1] if stack else None


def waits_for_others(thread: int) -> str | None:
    """Return the collective that the training thread waits in, if any: its own, one of the user's or of DDP's, or that
    of the gradients' thread during the backward pass."""
    own, frame = waits(thread), sys._current_frames().get(thread)
    if own is not None or frame is None:
        return own
    file = frame.f_code.co_filename
    if file.endswith(COLLECTIVES):
        return f"a collective of torch's {frame.f_code.co_name}()"
    if "autograd" not in file:
        return None
    helpers = [each for each in threading.enumerate() if each.name == GRADIENTS]
    return next((what for each in helpers if each.ident and (what := waits(each.ident))), None)


def progress() -> None:
    """Record that a micro-batch, a step or the like is done."""
    _progress[0] = time.monotonic()


def seconds_without_progress() -> float:
    return time.monotonic() - _progress[0]
