"""Starts workers by forking a process that has imported what they need: once, not once per worker and restart.

The elastic agent would start each worker as a new interpreter, which imports torch again. Workers of the fork server
begin with their first own work, and share the memory of all imported code.
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import psutil
import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from lockstep.base import ctrl_c, lifetime
from lockstep.base.errors import Interrupted
from lockstep.launch.launch_config import LaunchSection

POLL_SECONDS = 0.02
KILLED = -9
"""The exit code of workers whose server was killed: they are killed with it."""
IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that the server leaves to the workers and to the launcher."""


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    outputs: Mapping[int, str]
    """Files for stdout (1) and stderr (2), unless they are those of the launcher."""
    began: float
    """When its start began, in seconds since 1970."""


def refusal(modules: Sequence[str], section: LaunchSection, *, threads: int) -> str:
    """Why workers with so many threads cannot be forked from this process; empty if they can."""
    if sys.platform != "linux" or not _has_pidfd():
        return "this system lacks what it needs"
    if torch.backends.cuda.is_built() or torch.xpu._is_compiled():
        return "a driver may have been initialized"
    if section.environment:
        return "a new process may read variables of the user's before it runs any code of ours"
    if not modules:
        return "it is not known what they import"
    if threads != torch.get_num_threads():
        return "OpenMP has read its variables already"
    if len(os.listdir("/proc/self/task")) > 1:
        return "there are threads, which a forked process lacks, and whose locks may be held"
    return ""


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
    if refusal(modules, section, threads=threads):
        yield None
        return
    server = ForkServer(modules)
    try:
        yield server
    finally:
        server.close()


class ForkServer:
    """The launcher's side."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.began = psutil.Process().create_time()
        """When the start of the next workers began: of the first with this process."""
        self.codes: dict[int, int] = {}
        """Exit codes of workers by process id."""
        self.is_alive = True
        self.pipe, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        own = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _serve(theirs, own, modules)
        theirs.close()

    @contextmanager
    def starts_workers(self) -> Iterator[None]:
        """Have PyTorch's agent start its workers here, by the function that makes its handlers of processes."""
        if not self.is_alive:
            yield
            return
        original = api.get_subprocess_handler
        api.get_subprocess_handler = lambda **options: ForkedHandler(self, **options)
        try:
            yield
        finally:
            api.get_subprocess_handler = original
            self.began = time.time()

    def fork(self, start: WorkerStart) -> "ForkedProcess":
        """Start a worker. Raises OSError if it cannot be started."""
        try:
            self.pipe.send(start)
            while not isinstance(answer := self.pipe.recv(), int):
                self._note(answer)
        except (EOFError, OSError):
            self.is_alive = False
            raise ChildProcessError("the server that starts the workers was killed") from None
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return ForkedProcess(self, answer)

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a worker, negative for a signal; None while it runs."""
        try:
            while self.is_alive and self.pipe.poll():
                self._note(self.pipe.recv())
        except (EOFError, OSError):
            self.is_alive = False
        return self.codes.get(pid) if self.is_alive else self.codes.setdefault(pid, KILLED)

    def _note(self, exited: tuple[int, int]) -> None:
        pid, code = exited
        self.codes[pid] = code

    def close(self) -> None:
        """Kill the server, which may be importing, and with it what still runs."""
        self.is_alive = False
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


class ForkedProcess:
    """What the agent uses of subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid

    def poll(self) -> int | None:
        return self.server.exit_code(self.pid)

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(POLL_SECONDS)
        return code


class ForkedHandler(SubprocessHandler):
    """The agent's handler of a worker, which is forked."""

    def __init__(self, server: ForkServer, **options: Any) -> None:
        self.server = server
        super().__init__(**options)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        module = args.index("-m") + 1
        files = {1: self._stdout, 2: self._stderr}
        start = WorkerStart(
            module=args[module],
            arguments=args[module + 1 :],
            environment=env,
            outputs={descriptor: file.name for descriptor, file in files.items() if file},
            began=self.server.began,
        )
        return self.server.fork(start)


# ---- in the server


def _serve(launcher: Connection, launcher_pid: int, modules: Sequence[str]) -> NoReturn:
    """Import, then start a worker for each request and send each exit code, until the launcher ends."""
    code = 1
    try:
        lifetime.end_with_parent("SIGKILL", launcher_pid)
        lifetime.name_process("lockstep-fork")
        os.setsid()
        is_background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for name in IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        if not sys.flags.safe_path:
            del sys.path[0]  # the script's folder, or the working folder
        for name in modules:
            with suppress(Exception):  # it belongs to the worker, which will meet it again
                importlib.import_module(name)
        gc.freeze()  # else the first collection in each worker would copy all of this memory
        _loop(launcher, is_background=is_background)
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _loop(launcher: Connection, *, is_background: bool) -> NoReturn:
    """Raises EOFError or ConnectionError when the launcher has ended."""
    running: dict[int, BaseProcess] = {}
    """By a file descriptor that is readable once the process has exited."""
    while True:
        for ready in wait([launcher, *running]):
            if isinstance(ready, int):
                process = running.pop(ready)
                process.join()
                os.close(ready)
                launcher.send((process.pid, process.exitcode))
                continue
            options = {
                "server": os.getpid(),
                "inherited": [launcher.fileno(), *running],
                "is_background": is_background,
            }
            process = get_context("fork").Process(target=_work, args=(launcher.recv(),), kwargs=options)
            try:
                process.start()
            except OSError as error:
                launcher.send(-(error.errno or 1))
                continue
            assert process.pid is not None
            with suppress(OSError):  # it may have done so itself
                os.setpgid(process.pid, process.pid)
            running[os.pidfd_open(process.pid)] = process
            launcher.send(process.pid)


def _work(start: WorkerStart, *, server: int, inherited: Sequence[int], is_background: bool) -> NoReturn:
    """What a new interpreter would do: begin with nothing of the server's, then run the module."""
    with suppress(OSError):
        os.setpgid(0, 0)
    lifetime.end_with_parent("SIGKILL", server)
    for descriptor in inherited:
        os.close(descriptor)
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_background else signal.default_int_handler)
    ctrl_c.exit_silently(Interrupted.exit_code)
    for descriptor, name in start.outputs.items():
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(start.environment)
    os.environ.pop("PYTHONSAFEPATH", None)  # as a new worker does
    lifetime.name_process(f"lockstep-rank-{start.environment['RANK']}")
    lifetime.began = start.began
    sys.argv = [start.module, *start.arguments]
    importlib.import_module(start.module).run(sys.argv[1:])
    raise AssertionError("run() does not return")
