"""Trial runs: a recipe with some settings changed, in fresh processes that end with the command that asked for them.

`prove` and `estimate` start theirs through the launcher, as `lockstep train` does; `tune` copies a process that has
imported everything (tune/trial_process.py), since it starts many that do a few steps and may die of it.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.base import config, plugins, storage
from lockstep.base.config import PluginSection
from lockstep.base.errors import LockstepError
from lockstep.base.events import Bus
from lockstep.core.host.lifetime import end_family
from lockstep.run.recipe import Recipe
from lockstep.run.splits import Splits, prepare_splits

GRACE_SECONDS = 5
"""How long the processes of a trial get to end by themselves before they are killed."""
LOOK_SECONDS = 0.1
LOOKS_PER_COUNT = 10
"""Memory is counted at every tenth look: finding the processes of a trial means going through all of the machine."""
TAIL_LINES = 40
OUTPUT = "output.log"


class TrialFailed(LockstepError):
    """A trial ended with an error of its own, which is repeated; so is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code in (2, 3) else 1


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    """Exit code of its launcher."""
    output: str
    """What the launcher and rank 0 wrote."""
    peak_bytes: int
    """The most memory that its processes were seen to hold together."""


def tail(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-TAIL_LINES:])


def varied(recipe: Recipe, sections: Mapping[str, Mapping[str, Any]], *, parallel: PluginSection) -> Recipe:
    """The recipe with another strategy and some settings changed, by section."""
    updates: dict[str, Any] = {
        name: getattr(recipe, name).model_copy(update=dict(values)) for name, values in sections.items()
    }
    return recipe.model_copy(update={**updates, "parallel": parallel})


def run(
    recipe: Recipe,
    folder: Path,
    *,
    task: str,
    request: str,
    processes: int,
    on_cpu: bool = False,
    look: Callable[[], None] = lambda: None,
) -> Ended:
    """Do a task (see run/tasks) in fresh processes, and wait for its end.

    The recipe, the request and what is written lie in `folder`; `on_cpu`: the processes see no GPU; `look` is called
    every LOOK_SECONDS meanwhile.
    """
    local = plugins.find("launch.launchers", "local").Config(
        kind="local", processes=processes, grace_seconds=GRACE_SECONDS, max_restarts=0
    )
    path, asked = folder / "launch.yaml", folder / "request.json"
    storage.write(path, config.dump(recipe.model_copy(update={"launch": local})))
    storage.write(asked, request)
    command = [sys.executable, "-P", "-m", "lockstep.tools.trial_launcher", str(path), str(processes)]
    command += ["cpu" if on_cpu else "any", task, str(asked)]
    code, peak = _watched(command, folder / OUTPUT, look)
    output = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    return Ended(code=code, output=output, peak_bytes=peak)


def _watched(command: Sequence[str], log: Path, look: Callable[[], None]) -> tuple[int, int]:
    """Exit code, and the most bytes that all processes held."""
    peak = looks = 0
    with log.open("w", encoding="utf-8") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while launcher.poll() is None:
                look()
                looks += 1
                if looks % LOOKS_PER_COUNT == 0:
                    peak = max(peak, memory_of(launcher.pid))
                time.sleep(LOOK_SECONDS)
        finally:
            end_family(launcher, grace_seconds=GRACE_SECONDS + 2)
    return launcher.returncode, peak


def memory_of(pid: int) -> int:
    """Bytes that all processes below one hold in memory."""
    total = 0
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def prepared(recipe: Recipe) -> Splits:
    """Fetch and make what the data needs, once for all trials, with progress on the terminal."""
    bus = Bus()
    bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
    try:
        return prepare_splits(recipe, bus.publish)
    finally:
        bus.close()
