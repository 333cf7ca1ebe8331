"""Ctrl-C at any time: one word, also while modules are read, which takes seconds. Imports nothing that takes time."""

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
"""As shells count signals."""
ECHO_SECONDS = 1.0
"""A tool that passes on what the terminal has sent already makes two signals of one."""
_asked: list[float] = []
"""When Ctrl-C came first (time.monotonic)."""


def was_pressed() -> bool:
    """Whether an exception that is on its way may come from Ctrl-C, however the code in between has dressed it."""
    return bool(_asked)


def ends_at_once() -> None:
    """From now on Ctrl-C ends this process with a word: there is nothing to be tidied yet."""
    _answer(_end)


def ends_in_silence(code: int) -> None:
    """From now on Ctrl-C ends this process without a word, with this exit code: whoever has started it will speak.

    It may have been kept back until now (pthread_sigmask), since Python itself would answer with a traceback.
    """
    _answer(lambda *_: _leave(b"", code))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@contextmanager
def raising() -> Iterator[None]:
    """Meanwhile Ctrl-C raises KeyboardInterrupt, so that what has been begun can be undone; a second one ends. Where
    this process is no command of ours, but a test or a script, nothing is changed."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    _answer(_raise)
    try:
        yield
    finally:
        _answer(_end)


@contextmanager
def kept_back() -> Iterator[None]:
    """A process that is started meanwhile keeps SIGINT back until it can answer it: else each would show a traceback.

    Windows knows no such thing.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker  # noqa: PLC0415 (it takes time)

    resource_tracker.ensure_running()  # started together with the first process, it would let SIGINT in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(process: "BaseProcess", context: "BaseContext") -> None:
    """Start a process that keeps Ctrl-C back; here it is answered while the server of a context that has one reads for
    seconds what all processes need."""
    if context.get_start_method() == "forkserver":
        from multiprocessing import forkserver  # noqa: PLC0415 (it takes time)

        with kept_back():
            forkserver.ensure_running()
        process.start()
    else:
        with kept_back():
            process.start()


def _answer(handler: Callable[..., None]) -> None:
    """A shell's background jobs ignore it, and go on doing so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _end(*_: int | FrameType | None) -> None:
    _leave(b"interrupted\n", EXIT_CODE)


def _raise(*_: int | FrameType | None) -> None:
    now = time.monotonic()
    if not _asked:
        _asked.append(now)
        raise KeyboardInterrupt
    if now - _asked[0] > ECHO_SECONDS:
        _end()


def _leave(word: bytes, code: int) -> NoReturn:
    try:
        os.write(2, word)
    finally:
        os._exit(code)
