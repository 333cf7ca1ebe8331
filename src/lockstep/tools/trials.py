"""Trial runs: a recipe with some settings changed, run in fresh processes that end with the calling command.

`prove`, `estimate`, `scale`, `profile` and `doctor` start theirs through the launcher, as `lockstep train` does. `tune`
forks its own from a process that has imported everything (tune/trial_process.py): it starts many that do a few steps
each, and they may run out of memory.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json
from rich.console import Console

from lockstep.base import config, plugins, storage, trust
from lockstep.base.errors import ConfigError, LockstepError
from lockstep.base.events import Bus
from lockstep.base.lifetime import Started, end_family
from lockstep.core.host.memory_meter import descendants_bytes
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.launch import launch_run
from lockstep.launch.elastic import fork_server
from lockstep.launch.elastic.fork_server import ForkServer, ServerKilled, WorkerStart
from lockstep.parallel.strategy_config import StrategySection
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import Splits, prepare_splits

T = TypeVar("T")
GRACE_SECONDS = 5
"""Time for the processes of a trial to end before they are killed."""
POLL_SECONDS = 0.1
POLLS_PER_MEASUREMENT = 10
"""Memory is measured at every tenth poll: finding the processes of a trial means listing all of the machine's."""
TAIL_LINES = 40
LAUNCHER = "lockstep.tools.trial_launcher"
"""Module with run(argv)."""
OUTPUT = "output.log"
STAGES = "stages"
"""File with a line for each stage of a trial, written when the stage begins."""
RESULT = "rank-{}.json"
"""File with what a rank has measured."""
_server: ContextVar[ForkServer | None] = ContextVar("_server", default=None)


class TrialFailed(LockstepError):
    """A trial ended with an error; the message repeats the end of its output, and the exit code is passed on. `what` is
    left out where the user made a mistake, which the output explains by itself."""

    def __init__(self, output: str, code: int, what: str = "") -> None:
        tail = "\n".join(output.rstrip().splitlines()[-TAIL_LINES:])
        super().__init__(f"{tail}\n{what} ended with exit code {code}" if what else tail)
        self.exit_code = code if code in (2, 3) else 1


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    code: int
    """Exit code of the launcher."""
    output: str
    """Output of the launcher and rank 0."""
    peak_bytes: int
    """Peak memory of all processes together."""

    def checked(self) -> Self:
        """Return it. Raises TrialFailed where it ended with an error."""
        if self.code:
            raise TrialFailed(self.output, self.code)
        return self


def announce(folder: Path, stage: str) -> None:
    """Tell the command which stage of the trial in this folder begins. Does not wait for the disk."""
    with storage.append(folder / STAGES) as file:
        file.write(f"{stage}\n")


def write_result(folder: Path, rank: int, result: Any) -> None:
    """Write what a rank has measured: a model, a dataclass, or values of JSON."""
    storage.write(folder / RESULT.format(rank), to_json(result))


def results(folder: Path, kind: type[T]) -> list[T]:
    """Read what each rank has measured, in the order of ranks."""
    files = sorted(folder.glob(RESULT.format("*")), key=lambda file: int(file.stem.partition("-")[2]))
    return [TypeAdapter(kind).validate_json(file.read_bytes()) for file in files]


@contextmanager
def temporary_folder(prefix: str, inside: Path | None = None) -> Iterator[Path]:
    """Open a folder that is removed afterwards, after SIGTERM too."""
    with ended_by_sigterm(), TemporaryDirectory(prefix=prefix, dir=inside, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def timed_lines(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line, preceded by the seconds since this call."""
    start = time.monotonic()
    return lambda text: console.print(f"[{time.monotonic() - start:5.1f} s] {text}", soft_wrap=True)


def processes_text(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def world_sizes_of(text: str) -> tuple[int, ...]:
    """Parse "1,2,4" -> (1, 2, 4). Raises ConfigError."""
    try:
        sizes = tuple(int(each) for each in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--world {text}: give numbers of processes, such as 1,2,4,8")
    return tuple(dict.fromkeys(sizes))


def check_writable(option: str, file: Path | None, *, suffix: str = "") -> None:
    """Raise ConfigError, before anything is measured, for an output file that cannot be written, or is no `suffix`."""
    if file is None:
        return
    if suffix and file.suffix != suffix:
        raise ConfigError(f"{option} {file}: let its name end in {suffix}")
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}; make it, or name another folder")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {file}: cannot write to {file.parent}; name another folder")


def strategy(kind: str, **settings: Any) -> StrategySection:
    """Return the settings of a strategy: its defaults, except for `settings`."""
    section: StrategySection = plugins.find("parallel.strategies", kind).Config(kind=kind, **settings)
    return section


def strategy_of(recipe: Recipe, kind: str, **settings: Any) -> StrategySection:
    """Return the settings of a strategy: the recipe's own if it is the recipe's strategy, else as `strategy` does."""
    return recipe.parallel if recipe.parallel.kind == kind else strategy(kind, **settings)


def varied(recipe: Recipe, sections: Mapping[str, Mapping[str, Any]], *, parallel: StrategySection) -> Recipe:
    """Return the recipe with another strategy, without rechecks, and with some settings changed, by section."""
    sections = {**sections, "observe": {"recheck": None, **sections.get("observe", {})}}
    updates: dict[str, Any] = {
        name: getattr(recipe, name).model_copy(update=dict(values)) for name, values in sections.items()
    }
    return recipe.model_copy(update={**updates, "parallel": parallel})


def without_interruptions(recipe: Recipe, folder: Path, *, steps: int) -> dict[str, dict[str, Any]]:
    """Return settings, by section, of a run in a folder, without evaluations and saves before its end."""
    return {
        "run": {"dir": folder.parent, "name": folder.name},
        "train": {"steps": steps, "epochs": None, "stop_metric": None, "max_minutes": None},
        "schedule": {"warmup": recipe.schedule.warmup if recipe.schedule.warmup < 1 else 0.5},
        "evaluate": {"every_epochs": None, "every_steps": None},
        "checkpoint": {"every_steps": None, "every_minutes": None, "keep": 1, "best": None, "mirror": None},
    }


@contextmanager
def forking(recipe: Recipe, task: str | None = None, *, kind: str = "local") -> Iterator[None]:
    """Fork launchers of a `kind` in this context, where possible, from a process that imports them and what workers
    with a task need. Enter it before this process starts threads."""
    arguments = ("--task", task) if task else ()
    launcher = plugins.implementation_name("launch.launchers", kind)
    modules = (*launch_run.worker_modules(recipe, arguments), launcher, LAUNCHER)
    with fork_server.serving(modules, recipe.launch, threads=recipe.run.threads) as server:
        token = _server.set(server)
        try:
            yield
        finally:
            _server.reset(token)


def start(arguments: Sequence[str], log: Path) -> Started:
    """Start a launcher with these arguments after PARENT, which appends its output to `log`."""
    if (server := _server.get()) is not None:
        line, now = ("0", *arguments), time.time()
        own = WorkerStart(module=LAUNCHER, arguments=line, environment=None, log=str(log), began=now)
        with suppress(ServerKilled):
            return server.fork(own)
    command = [sys.executable, "-P", "-m", LAUNCHER, str(os.getpid()), *arguments]
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def written(recipe: Recipe, folder: Path, request: BaseModel | None, **launch: Any) -> tuple[str, str]:
    """Write a recipe for processes on this machine, with these settings of their start, and the request of their task
    -> the names of the files."""
    local = plugins.find("launch.launchers", "local").Config(kind="local", **launch)
    recipe_file, request_file = folder / "launch.yaml", folder / "request.json"
    storage.write(recipe_file, config.dump(recipe.model_copy(update={"launch": local})))
    storage.write(request_file, to_json(request))
    return str(recipe_file), str(request_file)


def run(
    recipe: Recipe,
    folder: Path,
    *,
    task: str,
    request: BaseModel | None,
    processes: int,
    poll: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = lambda _: None,
) -> TrialEnd:
    """Run a task (see run/tasks) in fresh processes to its end. The recipe, the request and the output are written to
    `folder`. `poll` is called every POLL_SECONDS, `report` with each stage that the task announces."""
    settings = {"share_gpus": recipe.launch.share_gpus, "grace_seconds": GRACE_SECONDS, "max_restarts": 0}
    recipe_file, request_file = written(recipe, folder, request, processes=processes, **settings)
    arguments = (recipe_file, str(processes), "--task", task, "--request", request_file, *trust.arguments())
    known = 0

    def report_stages() -> None:
        nonlocal known
        with suppress(FileNotFoundError):
            stages = (folder / STAGES).read_text(encoding="utf-8").split("\n")[known:-1]  # the last may not be whole
            known += len(stages)
            for stage in stages:
                report(stage)

    def look() -> None:
        poll()
        report_stages()

    storage.write(folder / OUTPUT, "")
    launcher = start(arguments, folder / OUTPUT)
    code, peak = followed(launcher, look, grace_seconds=GRACE_SECONDS + 2)
    report_stages()
    output = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    return TrialEnd(code=code, output=output, peak_bytes=peak)


def followed(launcher: Started, poll: Callable[[], None], *, grace_seconds: float) -> tuple[int, int]:
    """Wait for a launcher's end -> exit code, and the peak memory of the processes it started. After an exception, such
    as KeyboardInterrupt, it gets SIGTERM and may take `grace_seconds` to end."""
    peak = polls = 0
    try:
        while launcher.poll() is None:
            poll()
            polls += 1
            if polls % POLLS_PER_MEASUREMENT == 0:
                peak = max(peak, descendants_bytes(launcher.pid))
            time.sleep(POLL_SECONDS)
    finally:
        end_family(launcher, grace_seconds=grace_seconds)
    return launcher.wait(), peak


def prepared(recipe: Recipe) -> Splits:
    """Fetch and prepare the data once for all trials, with progress on the terminal."""
    bus = Bus()
    bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
    try:
        return prepare_splits(recipe, bus.publish)
    finally:
        bus.close()
