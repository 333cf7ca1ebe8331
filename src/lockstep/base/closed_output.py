"""Output whose reader has gone (`lockstep train | head -1`) is dropped: the work goes on. Imports nothing that takes
time."""

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.ECONNRESET)
"""A pipe that nobody reads, a terminal that has been closed."""
STREAMS = {1: "stdout", 2: "stderr"}


class Droppable(io.FileIO):
    """A file descriptor that leads nowhere once its reader has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            lead_nowhere(self.fileno())
            return memoryview(data).nbytes


_nowhere: set[int] = set()


def is_read(descriptor: int = 1) -> bool:
    """Whether somebody reads it, as far as the last write could tell."""
    return descriptor not in _nowhere


def lead_nowhere(descriptor: int) -> None:
    """Also for native code, and for what is started later."""
    nothing = os.open(os.devnull, os.O_RDWR)
    if nothing != descriptor:
        os.dup2(nothing, descriptor)
        os.close(nothing)
    _nowhere.add(descriptor)


def survives() -> None:
    """From now on this process's stdout and stderr may lose their reader; those that were closed from the start lead
    nowhere: else the next file that is opened would take their number, and what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            lead_nowhere(descriptor)
    for descriptor, name in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _opened(descriptor, "utf-8", "backslashreplace"))
        elif _is_plain(stream, descriptor):
            stream.flush()
            setattr(sys, name, _opened(descriptor, stream.encoding, stream.errors))


def _is_plain(stream: object, descriptor: int) -> bool:
    """Whether it is Python's own, and not that of a test or a notebook."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # with PYTHONUNBUFFERED there is nothing in between
    return type(raw) is io.FileIO and raw.fileno() == descriptor


def _opened(descriptor: int, encoding: str, errors: str | None) -> io.TextIOWrapper:
    raw = Droppable(descriptor, "w", closefd=False)
    in_lines = descriptor == 2 or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=in_lines)
