"""The line on the terminal while a command loads, before its first output, and the pause of garbage collection until
then: collections would take a sixth of the time. Imports nothing slow itself."""

import atexit
import gc
import os
import signal
import sys
from types import FrameType

SECONDS = 0.7
TEXT = "loading ...\n"
OBJECTS = 1_000_000
"""Number of objects from which collections begin all the same; torch and transformers create 700,000."""
_threshold = gc.get_threshold()


def begin() -> None:
    """Pause collections, and write the line to stderr after SECONDS, where it is a terminal; by a timer, since a thread
    would forbid forks."""
    gc.set_threshold(OBJECTS, *_threshold[1:])
    atexit.register(gc.freeze)  # else the interpreter ends with a search for garbage, of up to a second
    if hasattr(signal, "setitimer") and sys.stderr.isatty():
        signal.signal(signal.SIGALRM, _write)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)


def end() -> None:
    """Cancel the line, as there is other output now, and resume collections."""
    resume_collections()
    _disarm()


def resume_collections() -> None:
    """Collect garbage as Python does by default, though there was no output yet."""
    gc.set_threshold(*_threshold)


def _disarm() -> None:
    if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is _write:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _write(_: int, __: FrameType | None) -> None:
    _disarm()
    os.write(2, TEXT.encode())
