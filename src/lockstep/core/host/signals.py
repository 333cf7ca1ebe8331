"""Signals that request a stop: received even while the main thread is blocked in a collective."""

import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from lockstep.base.ctrl_c import ECHO_SECONDS
from lockstep.base.errors import Interrupted

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
CTRL_C_SECONDS = 4.0
"""Seconds after Ctrl-C at which a process that has not reached its step's end exits (the run stays resumable)."""


class SignalWatch:
    """Handler of signals: the first requests a stop at the next step boundary; a second one, or CTRL_C_SECONDS after
    Ctrl-C, exits at once with the exit code of Interrupted. So does the first signal before training starts."""

    def __init__(self, ignored: Collection[int] = ()) -> None:
        """`ignored`: signals that have no effect."""
        self.ignored = ignored
        self.is_graceful = False
        """Whether `requested` is polled: set once training begins."""
        self._requested = threading.Event()
        self._first = 0.0
        self._timer: threading.Timer | None = None

    def requested(self) -> bool:
        return self._requested.is_set()

    def cancel_timer(self) -> None:
        """Lift the time limit after Ctrl-C once the step is done: the last checkpoint may take longer."""
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle signals in a thread, from a socket: Python's handlers run in the main thread, which C++ may block."""
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
            sender.shutdown(socket.SHUT_RDWR)  # close() would not end the thread: a forked process holds a copy
            sender.close()
            thread.join()
            reader.close()

    def _read(self, reader: socket.socket) -> None:
        while byte := reader.recv(1):
            if byte[0] in SIGNALS and byte[0] not in self.ignored:
                self._handle(byte[0])

    def _handle(self, number: int) -> None:
        now = time.monotonic()
        if not self._requested.is_set():
            self._first = now
            self._requested.set()
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
    """Raise KeyboardInterrupt on SIGTERM: for commands that start processes and stop them on Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
