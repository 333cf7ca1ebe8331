"""Starts the launchers of trials: forked from a process that has imported what they need, or as new interpreters.

A launcher's module has run(argv), whose first argument is the id of the process that it ends with, or 0 for its parent.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from lockstep.base import plugins
from lockstep.base.lifetime import Started
from lockstep.launch import launch_run
from lockstep.launch.elastic import fork_server
from lockstep.launch.elastic.fork_server import ForkServer, ServerKilled, WorkerStart
from lockstep.recipe.recipe import Recipe

_server: ContextVar[ForkServer | None] = ContextVar("_server", default=None)


@contextmanager
def forking(recipe: Recipe, module: str, *, kind: str = "local", task: str | None = None) -> Iterator[None]:
    """Fork launchers in this context, where possible, from a process that imports `module`, the launcher of a `kind`
    and what workers with a task need. Enter it before this process starts threads."""
    arguments = ("--task", task) if task else ()
    launcher = plugins.implementation_name("launch.launchers", kind)
    modules = (*launch_run.worker_modules(recipe, arguments), launcher, module)
    with fork_server.serving(modules, recipe.launch, threads=recipe.run.threads) as server:
        token = _server.set(server)
        try:
            yield
        finally:
            _server.reset(token)


def start(module: str, arguments: Sequence[str], log: Path) -> Started:
    """Start a launcher, which appends its output to `log`."""
    if (server := _server.get()) is not None:
        own = ("0", *arguments)
        launcher = WorkerStart(module=module, arguments=own, environment=None, log=str(log), began=time.time())
        with suppress(ServerKilled):
            return server.fork(launcher)
    command = [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments]
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
