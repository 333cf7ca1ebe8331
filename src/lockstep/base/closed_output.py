"""Keep running when the reader of stdout or stderr has gone (`lockstep train | head -1`). Imports nothing slow."""

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.ECONNRESET)
"""Errors of a pipe without reader and of a closed terminal."""
STREAMS = {1: "stdout", 2: "stderr"}


class Droppable(io.FileIO):
    """A file descriptor that is redirected to the null device once its reader has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            redirect_to_null(self.fileno())
            return memoryview(data).nbytes


_redirected: set[int] = set()


def has_reader(descriptor: int = 1) -> bool:
    """Return whether a descriptor had a reader at the last write."""
    return descriptor not in _redirected


def redirect_to_null(descriptor: int) -> None:
    """Drop the output also of native code and of processes started later."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    _redirected.add(descriptor)


def tolerate_lost_reader() -> None:
    """Let stdout and stderr lose their reader from now on.

    Descriptors that are closed already are redirected: else the next opened file would get their number and output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            redirect_to_null(descriptor)
    for descriptor, name in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _open_text(descriptor, "utf-8", "backslashreplace"))
        elif _is_plain(stream, descriptor):
            stream.flush()
            is_immediate = stream.write_through  # PYTHONUNBUFFERED
            setattr(sys, name, _open_text(descriptor, stream.encoding, stream.errors, is_immediate=is_immediate))


def _is_plain(stream: object, descriptor: int) -> bool:
    """Return whether a stream is Python's own, and not that of a test or a notebook."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # with PYTHONUNBUFFERED there is no buffer in between
    return type(raw) is io.FileIO and raw.fileno() == descriptor


def _open_text(descriptor: int, encoding: str, errors: str | None, *, is_immediate: bool = False) -> io.TextIOWrapper:
    raw = Droppable(descriptor, "w", closefd=False)
    is_line_buffered = descriptor == 2 or raw.isatty() or is_immediate
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_line_buffered)
