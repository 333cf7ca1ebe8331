"""Status, logs and cancellation of a run that was launched."""

import io
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.base import plugins, storage
from lockstep.base.contracts import Launcher
from lockstep.base.errors import ConfigError, LaunchError, absence
from lockstep.checkpoint.layout import listed
from lockstep.launch import launch_run
from lockstep.launch.elastic import live_slots
from lockstep.observe.run_folder import LOOP, RunFolder
from lockstep.recipe import recipe as recipes

POLL_SECONDS = 0.2
JOB_SECONDS = 3.0
"""Pause between two questions to a scheduler."""
STEP = re.compile(r"^step [0-9]+/[0-9]+ .*$", re.MULTILINE)
MAX_LINE_CHARACTERS = 1 << 16
"""Longest piece in which a line is read."""


def status(folder: Path) -> list[str]:
    """Return lines that describe the state of a run. Raises ConfigError if there is no run."""
    if (folder / LOOP).is_file():
        lines = ["a script's own loop (lockstep.Loop)"]
        logged = next((line for line in RunFolder(folder).last_metric_lines() if line.kind == "step"), None)
        lines += [f"step {logged.step} was the last one logged"] if logged else []
    else:
        launcher, note = _job(folder)
        lines = [launcher.status(note)]
    if steps := STEP.findall(storage.tail(folder / "logs" / "rank-0.log")):
        lines.append(steps[-1])
    if checkpoints := listed(folder / "checkpoints"):
        lines.append(f"newest checkpoint: {checkpoints[0].name}")
    problems = list[str]()
    summary = RunFolder(folder, problems).summary()
    if problems:
        raise ConfigError(f"{folder}: {problems[0]}: remove it")
    if summary.status:
        lines.append(f"{summary.status} after {summary.steps} steps · digest {str(summary.digest)[:16]}")
    return lines


def is_over(folder: Path) -> bool:
    """Return whether a run's job has ended for good. Raises ConfigError if there is none, LaunchError."""
    launcher, note = _job(folder)
    return launcher.is_over(note)


def has_finished(folder: Path) -> bool:
    """Return whether a run has trained to its end."""
    return RunFolder(folder).summary().status in ("finished", "stopped early")


def cancel(folder: Path) -> str:
    """Have a run save and stop. Raises ConfigError, LaunchError."""
    launcher, note = _job(folder)
    return launcher.cancel(note)


def resize(folder: Path, processes: int) -> str:
    """Have a run go on with another number of processes. Raises ConfigError, LaunchError."""
    launcher, note = _job(folder)
    if storage.read_json(folder / launch_run.JOB).get("recovers_live") is not True:
        raise LaunchError(
            f"{folder.name} does not recover live (launch.recovery): cancel it, and start it again with "
            f"launch.processes={processes}; it resumes with the same bits"
        )
    if launcher.is_over(note):
        raise LaunchError(f"{folder.name} has ended: start it with launch.processes={processes}")
    recipe = recipes.load(folder / "launch.yaml")
    recipe.launch.model_copy(update={"processes": processes}).check_machine(threads=1)
    storage.write(folder / live_slots.RESIZE, f"{processes}\n")
    number = f"{processes} process{'es' if processes > 1 else ''}"
    if recipe.parallel.state_copies is not None:
        number += ", or the next number that makes whole replicas,"
    return f"{folder.name} goes on with {number} after one of the next steps"


def output(folder: Path) -> Path:
    """Return the file with what a terminal would show of a run. Raises ConfigError."""
    launcher, note = _job(folder)
    return launcher.output(note, folder / "logs")


def end_of(folder: Path) -> Callable[[], bool]:
    """Return a function that tells whether a run's job has ended; it asks the scheduler now and then."""
    (launcher, note), asked = _job(folder), time.monotonic()

    def has_ended() -> bool:
        nonlocal asked
        if time.monotonic() - asked < JOB_SECONDS:
            return False
        asked = time.monotonic()
        return launcher.is_over(note)

    return has_ended


def log_lines(
    folder: Path, rank: int | None, *, follow: bool, has_ended: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Yield the log of one rank, or what a terminal would show (None); `follow`: wait for new lines,
    until the run `has_ended`.

    Raises ConfigError if there is no run, LaunchError if there is no log yet and it is not followed.
    """
    launcher, note = _job(folder)
    logs = folder / "logs"
    file = launcher.output(note, logs) if rank is None else logs / f"rank-{rank}.log"
    if file.is_symlink():
        raise LaunchError(f"{file} is a link, which is not followed: it may lead out of the run's folder")
    if not follow and not file.is_file():
        files = ", ".join(sorted(p.name for p in logs.glob("*") if p.is_file())) or "nothing"
        raise LaunchError(f"there is no {file} yet; in {logs} there is: {files}")
    is_over = False
    while not file.is_file():
        if is_over:
            return
        is_over = has_ended()
        time.sleep(POLL_SECONDS)
    with io.TextIOWrapper(storage.regular(file), encoding="utf-8", errors="replace", newline="\n") as text:
        yield from iter(lambda: text.readline(MAX_LINE_CHARACTERS), "")
        while follow:
            if line := text.readline(MAX_LINE_CHARACTERS):
                yield line
            elif is_over:
                return
            else:
                is_over = has_ended()
                time.sleep(POLL_SECONDS)


def _job(folder: Path) -> tuple[Launcher, dict[str, Any]]:
    """Return the launcher of a run, and its note on the job."""
    file = folder / launch_run.JOB
    try:
        job = storage.read_json(file)
        kind = job.get("kind") if isinstance(job, dict) else None
        note = plugins.find("launch.launchers", str(kind)).Note.model_validate(job).model_dump()
    except (FileNotFoundError, NotADirectoryError):
        what = absence(folder, f"there is no {launch_run.JOB} in it")
        raise ConfigError(f"{folder} was not started by `lockstep train`: {what}") from None
    except (OSError, ValueError, ConfigError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{file} cannot be used ({reason}): `lockstep train` writes a new one") from None
    recipe = recipes.load(folder / "launch.yaml")
    if recipe.launch.kind != kind:
        raise ConfigError(f"{file} is of launch.kind={kind}, but launch.yaml of {recipe.launch.kind}")
    return launch_run.build_launcher(recipe), note
