"""Stack dumps of data loader workers: each writes its stack to a file on a signal, even while it is blocked."""

import faulthandler
import os
import signal
import tempfile
import time
import weakref
from contextlib import suppress
from typing import IO

_open: weakref.WeakSet["StackFiles"] = weakref.WeakSet()
TIMEOUT_SECONDS = 1.0
MAX_BYTES = 1 << 20


class StackFiles:
    """An unnamed file for each worker process to be forked, open in both processes."""

    def __init__(self, workers: int) -> None:
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(workers)]  # noqa: SIM115 (for the workers' life)
        _open.add(self)
        weakref.finalize(self, _close, self.files)

    def register(self, number: int) -> None:
        """Write the process id of worker `number` to its file, and its stack on every SIGUSR2; called in the worker."""
        file = self.files[number]
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)
        os.write(file.fileno(), f"{os.getpid()}\n".encode())

    def dump(self) -> dict[int, str]:
        """Return process id -> its current stack in faulthandler's format; without those that do not respond."""
        before = [os.fstat(file.fileno()).st_size for file in self.files]
        processes = [os.pread(file.fileno(), 32, 0).partition(b"\n")[0] for file in self.files]
        for process in filter(None, processes):
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGUSR2)
        stacks, deadline = {}, time.monotonic() + TIMEOUT_SECONDS
        for process, file, size in zip(processes, self.files, before, strict=True):
            while process and os.fstat(file.fileno()).st_size == size and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.01)  # the rest of the stack
            if text := os.pread(file.fileno(), MAX_BYTES, size):
                stacks[int(process)] = text.decode(errors="replace")
        return stacks


def _close(files: list[IO[bytes]]) -> None:
    for file in files:
        file.close()


def dump_all() -> dict[int, str]:
    """Return the stacks of all loader workers of this process."""
    return {process: text for files in list(_open) for process, text in files.dump().items()}
