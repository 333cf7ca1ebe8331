"""Where a data loader's worker processes are: each writes its stack at a signal, whatever it is at."""

import faulthandler
import os
import signal
import tempfile
import time
import weakref
from contextlib import suppress
from typing import IO

_open: weakref.WeakSet["StackFiles"] = weakref.WeakSet()
SECONDS = 1.0
"""How long a worker may take to answer."""
SIZE = 1 << 20


class StackFiles:
    """A file without a name for each worker process to be forked; both sides have it open."""

    def __init__(self, workers: int) -> None:
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(workers)]  # noqa: SIM115 (for the workers' life)
        _open.add(self)
        weakref.finalize(self, _close, self.files)

    def answer(self, number: int) -> None:
        """In worker `number`: write the stack to its file at SIGUSR2, after the process's id."""
        file = self.files[number]
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)
        os.write(file.fileno(), f"{os.getpid()}\n".encode())

    def ask(self) -> dict[int, str]:
        """Process -> its stack now, as faulthandler writes it; a process that does not answer is left out."""
        before = [os.fstat(file.fileno()).st_size for file in self.files]
        processes = [os.pread(file.fileno(), 32, 0).partition(b"\n")[0] for file in self.files]
        for process in filter(None, processes):
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGUSR2)
        found, end = {}, time.monotonic() + SECONDS
        for process, file, size in zip(processes, self.files, before, strict=True):
            while process and os.fstat(file.fileno()).st_size == size and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.01)  # the rest of the stack
            if text := os.pread(file.fileno(), SIZE, size):
                found[int(process)] = text.decode(errors="replace")
        return found


def _close(files: list[IO[bytes]]) -> None:
    for file in files:
        file.close()


def ask_all() -> dict[int, str]:
    """The stacks of all loader workers of this process."""
    return {process: text for files in list(_open) for process, text in files.ask().items()}
