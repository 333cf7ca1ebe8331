"""Commands as processes that are forked from a warm one, which has imported what they need.

`Popen` and `run` stand in for subprocess in tests of what a command does: a real process with its own arguments,
folder, variables and pipes, whose workers are forked in turn. Tests of how a command starts use subprocess.
"""

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from contextlib import suppress

import psutil

import lockstep
from lockstep import __main__
from lockstep.launch.elastic.fork_server import _end
from lockstep.protocol.environment import CPP_LOG_LEVEL

PRELOADED = (
    "lockstep.cli.train",
    "lockstep.data.sources.digits",
    "lockstep.inference.trained_model",
    "lockstep.observe.report.report_page",
    "lockstep.parallel.strategies._pipeline",
    "lockstep.run.tasks.train_live",
    "lockstep.run.worker",
    "lockstep.inference.evaluate.evaluate_model",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchmetrics.classification",
    "matplotlib.figure",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
POLL_SECONDS = 0.01
LARGEST = 1 << 18
"""Bytes of a message."""
CLONE_NEWNET = 0x40000000
"""From <sched.h>."""


class Server:
    """The warm process, started when it is first needed."""

    def __init__(self):
        self.process, self.codes, self.standing = None, {}, set()
        atexit.register(self.close)

    def fork(self, request, descriptors):
        """Start a command -> process id."""
        if self.process is None:
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line = [sys.executable, __file__, str(theirs.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", CPP_LOG_LEVEL: "ERROR"}
            self.process = subprocess.Popen(line, pass_fds=[theirs.fileno()], env=environment)
            theirs.close()
        socket.send_fds(self.socket, [pickle.dumps(request)], descriptors)
        while (message := self._receive())[1] is not None:
            self.codes[message[0]] = message[1]
        self.codes.pop(message[0], None)  # of an earlier process with this id
        return message[0]

    def exit_code(self, pid):
        """None while it runs."""
        while pid not in self.codes and select.select([self.socket], [], [], 0)[0]:
            ended, code = self._receive()
            self.codes[ended] = code
        return self.codes.get(pid)

    def _receive(self):
        if not (data := self.socket.recv(LARGEST)):
            raise ChildProcessError("the warm process has ended")
        return pickle.loads(data)

    def pids(self):
        """Its own, and those of commands that outlive a test."""
        found = {self.process.pid} if self.process else set()
        for pid in self.standing:
            with suppress(psutil.NoSuchProcess):
                found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        return found

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.socket.close()
        self.process = None


server = Server()


class Popen(subprocess.Popen):
    """As subprocess.Popen([sys.executable, "-m", *words]) for `lockstep` and modules that have run(), also those beside
    this one, or [sys.executable, *words] for scripts; `ip netns exec NAME` may stand before the words."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = others[:9]
        start_new_session = others[14]
        given = {0: p2cread, 1: c2pwrite, 2: errwrite}
        given = {target: descriptor for target, descriptor in given.items() if descriptor != -1}
        environment = dict(os.environ if env is None else env)
        request = (list(map(str, args)), str(cwd or os.getcwd()), environment, list(given), start_new_session)
        self.pid = server.fork(request, list(given.values()))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_, **__):
        if self.returncode is None:
            self.returncode = server.exit_code(self.pid)
        return self.returncode

    def _wait(self, timeout):
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self._internal_poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(POLL_SECONDS)
        return self.returncode


def run(words, *, timeout, **options):
    """As subprocess.run with captured text."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Popen(words, **pipes | options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


# ---- in the warm process


def import_all():
    """Import what commands need, before the first of them is forked."""
    warnings.filterwarnings("ignore")
    for name in PRELOADED:
        importlib.import_module(name)
    for found in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
        if not found.name.endswith("__main__"):
            with suppress(ImportError):  # of a package that is optional
                importlib.import_module(found.name)
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's would take a twentieth of a command's time
    gc.collect()
    gc.freeze()  # else the first collection in each command would copy all of this memory


def _serve(pipe):
    """Fork for every request, and send every exit code."""
    import_all()
    running = {}
    while True:
        for ready in select.select([pipe, *running], [], [])[0]:
            if ready is pipe:
                pid = _fork(pipe, running)
                running[os.pidfd_open(pid)], code = pid, None
            else:
                pid = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(ready)
            pipe.send(pickle.dumps((pid, code)))


def _fork(pipe, running):
    """Receive a request and start its command -> process id."""
    data, descriptors, *_ = socket.recv_fds(pipe, LARGEST, 3)
    if not data:
        sys.exit()  # the tests have ended, one way or another
    pid = os.fork()
    if pid == 0:
        pipe.close()
        for each in running:
            os.close(each)
        _end(lambda: _command(descriptors, *pickle.loads(data)))
    for each in descriptors:
        os.close(each)
    return pid


def _command(descriptors, words, folder, environment, targets, start_new_session):
    """Be the process of a command."""
    if start_new_session:
        os.setsid()
    os.chdir(folder)
    for target, descriptor in zip(targets, descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None  # that of these variables
    if words[:3] == ["ip", "netns", "exec"]:
        _enter_network(words[3])
        words = words[4:]
    sys.argv = [__main__.__file__, *words[1:]]
    if words[0] == "lockstep":
        del sys.path[0]  # as with -m; it was the folder of this file
        __main__.main()
    if words[0].endswith(".py"):
        sys.path[0], sys.argv = os.path.dirname(words[0]), words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    importlib.import_module(words[0]).run(words[1:])


def _enter_network(name):
    """Move this process into a network namespace that `ip netns add` has made."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        _serve(socket.socket(fileno=int(sys.argv[1])))
