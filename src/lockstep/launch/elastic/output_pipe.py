"""A pipe from a worker to a stream of this process: a notebook's output is no file that a process can inherit."""

import codecs
import os
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TextIO

TAIL_CHARACTERS = 20_000
CHUNK_BYTES = 1 << 16


class OutputPipe:
    """Copies what a worker writes to `writer`, a file descriptor, to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.tail = stream, ""
        self.reader, self.writer = os.pipe()
        self.is_open = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy_chunk(self) -> bool:
        """Copy what can be read to the stream -> whether there was anything."""
        chunk = os.read(self.reader, CHUNK_BYTES)
        text = self._decoder.decode(chunk, final=not chunk)
        self.is_open = bool(chunk)
        if text:
            self.tail = (self.tail + text)[-TAIL_CHARACTERS:]
            self.stream.write(text)
            self.stream.flush()
        return bool(chunk)

    def close(self) -> None:
        """Copy what is left, and close the read end."""
        while self.is_open and wait([self.reader], 0.0):
            self.copy_chunk()
        self.is_open = False
        with suppress(OSError):
            os.close(self.reader)
