"""Handling of Ctrl-C at any time, also during slow imports. Imports nothing slow itself."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

EXIT_CODE = 130
"""128 + SIGINT, as in shells."""
ECHO_SECONDS = 1.0
"""Time within which a second signal may be a copy of the first, forwarded by a launcher or a tool such as make."""
_pressed_at: list[float] = []
"""Time of the first Ctrl-C (time.monotonic); empty before."""


def was_pressed() -> bool:
    """Return whether an exception may stem from Ctrl-C, even if code in between has replaced KeyboardInterrupt."""
    return bool(_pressed_at)


def exit_at_once() -> None:
    """Make Ctrl-C print one word and exit from now on, without cleaning up."""
    _set_handler(_exit_interrupted)


def exit_silently(code: int) -> None:
    """Make Ctrl-C exit with this code from now on, without a message, which the parent process prints.

    Unblocks SIGINT, which `blocked` may have blocked since the start: Python itself would print a traceback.
    """
    _set_handler(lambda *_: _exit(b"", code))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@contextmanager
def raising() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C inside, so that a command can clean up; a second Ctrl-C exits.

    Changes nothing in processes that are not commands of ours, such as tests and scripts.
    """
    if signal.getsignal(signal.SIGINT) is not _exit_interrupted:
        yield
        return
    _set_handler(_raise)
    try:
        yield
    finally:
        _set_handler(_exit_interrupted)


@contextmanager
def blocked() -> Iterator[None]:
    """Block SIGINT in processes started inside until they handle it: else each would print a traceback.

    Does nothing on Windows, which has no signal masks.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker  # noqa: PLC0415 (slow)

    resource_tracker.ensure_running()  # started later, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(process: "BaseProcess", context: "BaseContext") -> None:
    """Start a process with SIGINT blocked; it stays unblocked here while a fork server imports modules for seconds."""
    from lockstep.base import socket_folder  # noqa: PLC0415 (slow)

    socket_folder.ensure_short()
    if context.get_start_method() == "forkserver":
        from multiprocessing import forkserver  # noqa: PLC0415 (slow)

        with blocked():
            forkserver.ensure_running()
        process.start()
    else:
        with blocked():
            process.start()


def _set_handler(handler: Callable[..., None]) -> None:
    """Handle SIGINT, except in background jobs of a shell, which ignore it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _exit_interrupted(*_: int | FrameType | None) -> None:
    _exit(b"interrupted\n", EXIT_CODE)


def _raise(*_: int | FrameType | None) -> None:
    now = time.monotonic()
    if not _pressed_at:
        _pressed_at.append(now)
        raise KeyboardInterrupt
    if now - _pressed_at[0] > ECHO_SECONDS:
        _exit_interrupted()


def _exit(message: bytes, code: int) -> NoReturn:
    try:
        os.write(2, message)
    finally:
        os._exit(code)
