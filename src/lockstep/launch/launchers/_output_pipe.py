"""A pipe from a process to a stream of this one: a notebook's output is no file that a process could inherit."""

import codecs
import os
import sys
from contextlib import suppress
from multiprocessing import reduction
from typing import Any, TextIO

TAIL_CHARACTERS = 20_000
CHUNK_BYTES = 1 << 16


class Outlet:
    """Carries what a process writes to `stream`; pickled into a process that is being started, the end to write to."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.tail = stream, ""
        self.reader, self.writer = os.pipe()
        self.is_open = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __getstate__(self) -> dict[str, Any]:
        assert sys.platform != "win32", "outlets are for systems where processes inherit file descriptors"
        return {"writer": reduction.DupFd(self.writer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.writer = state["writer"].detach()

    def pass_on(self) -> bool:
        """What has come, to the stream -> whether there was anything."""
        chunk = os.read(self.reader, CHUNK_BYTES)
        text = self._decoder.decode(chunk, final=not chunk)
        self.is_open = bool(chunk)
        if text:
            self.tail = (self.tail + text)[-TAIL_CHARACTERS:]
            self.stream.write(text)
            self.stream.flush()
        return bool(chunk)

    def close_writer(self) -> None:
        """Once the process has been started: else the pipe would never end."""
        os.close(self.writer)

    def close(self) -> None:
        self.is_open = False
        with suppress(OSError):
            os.close(self.reader)
