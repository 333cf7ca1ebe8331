"""Starts workers by forking a process that has imported what they need: once, not once per worker and restart.

A worker that is started as a new interpreter imports torch again. Workers of the fork server begin with their first own
work, and share the memory of all imported code.
"""

import atexit
import faulthandler
import gc
import importlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import psutil
import torch

from lockstep.base import ctrl_c, lifetime, loading
from lockstep.base.errors import Interrupted
from lockstep.core.host import deferred_imports
from lockstep.launch.launch_config import LaunchSection
from lockstep.protocol.live_messages import TERMINAL

POLL_SECONDS, IMPORT_POLL_SECONDS = 0.02, 0.1
KILLED = -9
"""The exit code of workers whose server was killed: they are killed with it."""
SIGNALS = [each for each in signal.Signals if each.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")]
"""Signals that the launcher and the workers handle; the server ignores them."""


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None
    """Environment variables; None: those of the server."""
    log: str = ""
    """File for stdout and stderr, unless they are those of the launcher."""
    began: float
    """Time at which its start began, in seconds since 1970."""


def _can_fork(modules: Sequence[str], section: LaunchSection, *, threads: int) -> bool:
    """Return whether workers with so many threads can be forked from this process."""
    reasons_not_to = (
        not modules,
        sys.platform != "linux" or not _has_pidfd(),
        torch.backends.cuda.is_built() or torch.xpu._is_compiled(),  # a driver may have been initialized
        section.environment or section.debug,  # a new process may read these before it runs any code of ours
        threads != torch.get_num_threads(),  # OpenMP has read its variables already
    )
    return not any(reasons_not_to) and len(os.listdir("/proc/self/task")) == 1  # a forked process lacks other threads


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


@contextmanager
def serving(modules: Sequence[str], section: LaunchSection, *, threads: int) -> "Iterator[ForkServer | None]":
    """Start a fork server with the modules that workers import; None if each has to be started as a new process.

    Must be called before this process starts threads.
    """
    loading.resume_collections()  # a launcher lives for long, and leaves the output to the workers
    if not _can_fork(modules, section, threads=threads):
        yield None
        return
    server = ForkServer(modules)
    try:
        yield server
    finally:
        server.close()


class ServerKilled(ChildProcessError):
    """The fork server was killed, and its workers with it."""


class ForkServer:
    """The launcher's side of the server."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.began: float | None = psutil.Process().create_time()
        """Time at which the start of the first workers began; None after it."""
        self.codes: dict[int, int] = {}
        """Exit codes of workers by process id."""
        self.is_alive, self.is_importing = True, True
        self.answer: int | None = None
        """Reply to the newest request: a process id, or a negative errno."""
        self.pipe, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        own = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _serve(theirs, own, modules)
        theirs.close()

    def is_ready(self) -> bool:
        """Wait until it has imported everything; meanwhile signals are handled as always. False if it was killed."""
        while self.is_importing and self.is_alive:
            self._receive(IMPORT_POLL_SECONDS)
        return self.is_alive

    def fork(self, start: WorkerStart) -> "ForkedProcess":
        """Start a worker. Raises ServerKilled, or OSError if it cannot be started."""
        try:
            self.pipe.send(start)
        except OSError:
            self.is_alive = False
        self.answer = None
        while self.is_alive and self.answer is None:
            self._receive(POLL_SECONDS)
        if self.answer is None:
            raise ServerKilled("the process that starts the workers was killed")
        if self.answer < 0:
            raise OSError(-self.answer, os.strerror(-self.answer))
        self.codes.pop(self.answer, None)  # of an earlier process with this id
        return ForkedProcess(self, self.answer)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker, negative for a signal; None while it runs."""
        is_gone = not psutil.pid_exists(pid)
        while self._receive(0.0):
            pass
        if is_gone or not self.is_alive:
            return self.codes.setdefault(pid, KILLED)
        return self.codes.get(pid)

    def _receive(self, seconds: float) -> bool:
        """Receive a message, if one comes in time: an exit code, a new process id, or None once all is imported."""
        try:
            if not self.is_alive or not self.pipe.poll(seconds):
                return False
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.is_alive = False
            return False
        if message is None:
            self.is_importing = False
        elif isinstance(message, int):
            self.answer = message
        else:
            self.codes[message[0]] = message[1]
        return True

    def close(self) -> None:
        """Kill the server, which may be importing, and with it what still runs."""
        self.is_alive = False
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


class ForkedProcess:
    """A worker that was forked, with the methods of subprocess.Popen that are used."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid

    def poll(self) -> int | None:
        return self.server.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


# ---- in the server


def _serve(launcher: Connection, launcher_pid: int, modules: Sequence[str]) -> NoReturn:
    """Import, then start a worker for each request and send each exit code, until the launcher ends."""
    code = 1
    try:
        lifetime.end_with_parent("SIGKILL", launcher_pid)
        lifetime.name_process(lifetime.FORK_SERVER)
        os.setsid()
        is_background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        script = {os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
        if not sys.flags.safe_path and sys.path[0] in script:
            del sys.path[0]  # as in a process that is started with -P
        deferred_imports.install()
        gc.disable()  # collections would take a sixth of the time of the imports
        for name in modules:
            with suppress(BaseException):  # the worker raises it again
                importlib.import_module(name)
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # no worker removes what all share
        gc.freeze()  # else the first collection in each worker would copy all of this memory
        gc.enable()
        launcher.send(None)
        _loop(launcher, is_background=is_background)
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _loop(launcher: Connection, *, is_background: bool) -> NoReturn:
    """Handle requests and exits. Raises EOFError or ConnectionError when the launcher has ended."""
    running: dict[int, int] = {}
    """Process ids by file descriptors that are readable once the process has exited."""
    while True:
        for ready in wait([launcher, *running]):
            if isinstance(ready, int):
                pid = running.pop(ready)
                status = os.waitid(os.P_PIDFD, ready, os.WEXITED | os.WNOWAIT)
                assert status is not None
                code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
                launcher.send((pid, code))
                os.waitpid(pid, 0)  # afterwards: a process that is gone has been reported
                os.close(ready)
                continue
            start = launcher.recv()
            try:
                pid = _fork(start, inherited=[launcher.fileno(), *running], is_background=is_background)
            except OSError as error:
                launcher.send(-(error.errno or 1))
                continue
            running[os.pidfd_open(pid)] = pid
            launcher.send(pid)


def _fork(start: WorkerStart, *, inherited: Sequence[int], is_background: bool) -> int:
    """Start a worker -> its process id. Signals that come before it can handle them wait. Raises OSError."""
    server, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _end(lambda: _work(start, server=server, inherited=inherited, is_background=is_background))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with suppress(OSError):  # it may have done so itself
        os.setpgid(pid, pid)
    return pid


def _end(main: Callable[[], NoReturn]) -> NoReturn:
    """Run `main` and end the process as an interpreter does at the end of a script."""
    code: Any = 1
    try:
        try:
            main()
        except SystemExit as end:
            code = end.code
            if code is not None and not isinstance(code, int):
                sys.stderr.write(f"{code}\n")
                code = 1
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit((code or 0) & 0xFF)


def _work(start: WorkerStart, *, server: int, inherited: Sequence[int], is_background: bool) -> NoReturn:
    """Drop what is inherited from the server, and run the module as in a new interpreter."""
    with suppress(OSError):
        os.setpgid(0, 0)
    lifetime.end_with_parent("SIGKILL", server)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # a new interpreter draws other numbers, too
    for descriptor in inherited:
        os.close(descriptor)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_background else signal.default_int_handler)
    ctrl_c.exit_silently(Interrupted.exit_code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    is_live = start.environment is not None and TERMINAL in start.environment
    terminal = f"{os.dup(1)},{os.dup(2)}" if is_live else ""
    if start.log:
        file = os.open(start.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, lifetime.STDERR)
        os.close(file)
    faulthandler.enable(lifetime.STDERR)
    if start.environment is not None:
        os.environ.clear()
        os.environ.update(start.environment)
        if is_live:
            os.environ[TERMINAL] = terminal
        lifetime.name_process(lifetime.rank_name(start.environment["RANK"]))
    os.environ.pop("PYTHONSAFEPATH", None)  # as a new worker does
    lifetime.began = start.began
    sys.argv = [start.module, *start.arguments]
    importlib.import_module(start.module).run(sys.argv[1:])
    raise AssertionError("run() does not return")
