"""The processes of a sweep's trials: forked from one that has imported what they need, where that can be done."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.base import plugins
from lockstep.base.lifetime import Started
from lockstep.launch import launch_run
from lockstep.launch.elastic import fork_server
from lockstep.launch.elastic.fork_server import ForkServer, ServerKilled, WorkerStart
from lockstep.observe.watch.run_state import LAUNCH
from lockstep.run.recipe import Recipe
from lockstep.tools.trials import OUTPUT

MODULE = "lockstep.tools.sweep.trial_start"


@dataclass(frozen=True)
class TrialProcesses:
    server: ForkServer | None

    def start(self, folder: Path, trust: Sequence[str]) -> Started:
        """The launcher of the run in this folder."""
        log, arguments = folder / "logs" / OUTPUT, (str(folder / LAUNCH), *trust)
        if self.server is not None:
            start = WorkerStart(
                module=MODULE,
                arguments=("0", *arguments),
                environment=None,
                outputs=dict.fromkeys((1, 2), str(log)),
                began=time.time(),
            )
            with suppress(ServerKilled):
                return self.server.fork(start)
        command = [sys.executable, "-P", "-m", MODULE, str(os.getpid()), *arguments]
        with log.open("a", encoding="utf-8") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


@contextmanager
def serving(recipe: Recipe) -> Iterator[TrialProcesses]:
    """Import what trials like this one need. To be called before this process starts threads."""
    launcher = plugins.implementation_name("launch.launchers", recipe.launch.kind)
    modules = (*launch_run.worker_modules(recipe, ()), launcher, MODULE)
    with fork_server.serving(modules, recipe.launch, threads=recipe.run.threads) as server:
        yield TrialProcesses(server)
