"""Signals that ask a process to end: noticed even while the main thread waits in a collective."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.base.errors import Interrupted

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
CTRL_C_SECONDS = 4.0
"""After Ctrl-C, a process that has not ended by itself after this long ends at once (the run stays resumable)."""
ECHO_SECONDS = 1.0
"""A launcher passes on what the terminal has sent already: signals this close together are one."""


class SignalWatch:
    """The first signal asks for an end at the next step boundary; a second one, or a long wait after Ctrl-C, ends
    the process on the spot with the exit code of Interrupted. So does the first while there are no steps yet."""

    def __init__(self) -> None:
        self.is_graceful = False
        """Whether somebody looks at `requested`: set once training begins."""
        self._asked = threading.Event()
        self._first = 0.0
        self._timer: threading.Timer | None = None

    def requested(self) -> bool:
        """Whether this process has been asked to end."""
        return self._asked.is_set()

    def accepted(self) -> None:
        """The step's end has been reached: the last save may take longer than Ctrl-C would wait for a step."""
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take over the signals. They arrive on a socket that a thread reads: Python's own handlers would wait for
        the main thread, which may be blocked in C++."""
        reader, sender = socket.socketpair()
        sender.setblocking(False)  # noqa: FBT003 (its only argument)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sender.shutdown(socket.SHUT_RDWR)  # closing alone would not end it: a forked process holds a copy
            sender.close()
            thread.join()
            reader.close()

    def _read(self, reader: socket.socket) -> None:
        while byte := reader.recv(1):
            if byte[0] in SIGNALS:
                self._arrived(byte[0])

    def _arrived(self, number: int) -> None:
        now = time.monotonic()
        if not self._asked.is_set():
            self._first = now
            self._asked.set()
            if not self.is_graceful:
                os._exit(Interrupted.exit_code)
            if number == signal.SIGINT:
                self._timer = threading.Timer(CTRL_C_SECONDS, os._exit, (Interrupted.exit_code,))
                self._timer.daemon = True
                self._timer.start()
        elif now - self._first > ECHO_SECONDS:
            os._exit(Interrupted.exit_code)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """For a command that trains in processes of its own: SIGTERM ends it as Ctrl-C does, with all that it started."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
