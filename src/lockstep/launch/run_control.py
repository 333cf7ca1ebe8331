"""What becomes of a run that was started: where it is, what it says, and how to end it."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from lockstep.base import plugins, storage
from lockstep.base.contracts import Launcher
from lockstep.base.errors import ConfigError, LaunchError
from lockstep.checkpoint.layout import listed
from lockstep.launch import launch_run
from lockstep.run import recipe as recipes

LOOK_SECONDS = 0.2
STEP = re.compile(r"^step [0-9]+/[0-9]+ .*$", re.MULTILINE)
TAIL_BYTES = 1 << 16
MOST_OF_A_LINE = 1 << 16
"""Characters that are read at a time."""


def status(folder: Path) -> list[str]:
    """What there is to say of a run, a line each. Raises ConfigError where there is none."""
    launcher, note = _job(folder)
    lines = [launcher.status(note)]
    if said := STEP.findall(_tail(folder / "logs" / "rank-0.log")):
        lines.append(said[-1])
    if saved := listed(folder / "checkpoints"):
        lines.append(f"newest checkpoint: {saved[0].name}")
    if (summary := _summary(folder / "summary.json")) is not None:
        lines.append(f"{summary.status} after {summary.steps} steps · digest {str(summary.digest)[:16]}")
    return lines


class Summary(BaseModel):
    """What is told of a run that has ended."""

    status: str = Field(max_length=64)
    steps: int = Field(ge=0)
    digest: str | None = Field(max_length=128)


def _summary(file: Path) -> Summary | None:
    """That of a run, if it has ended. Raises ConfigError."""
    try:
        return Summary.model_validate_json(storage.read(file, storage.MOST_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{file} cannot be used ({reason}): remove it") from None


def cancel(folder: Path) -> str:
    """Have a run save and end. Raises ConfigError, LaunchError."""
    launcher, note = _job(folder)
    return launcher.cancel(note)


def lines(folder: Path, rank: int | None, *, follows: bool) -> Iterator[str]:
    """What a run has said, by one of its ranks or, None, as a whole; `follows`: and goes on to say.

    Raises ConfigError where there is no run, LaunchError where it has said nothing yet and is not followed.
    """
    launcher, note = _job(folder)
    logs = folder / "logs"
    file = launcher.output(note, logs) if rank is None else logs / f"rank-{rank}.log"
    if file.is_symlink():
        raise LaunchError(f"{file} is a link, which is not followed: it may lead out of the run's folder")
    if not follows and not file.is_file():
        there = ", ".join(sorted(p.name for p in logs.glob("*") if p.is_file())) or "nothing"
        raise LaunchError(f"there is no {file} yet; in {logs} there is: {there}")
    while not file.is_file():
        time.sleep(LOOK_SECONDS)
    with file.open(encoding="utf-8", errors="replace", newline="\n") as text:
        yield from iter(lambda: text.readline(MOST_OF_A_LINE), "")
        while follows:
            if line := text.readline(MOST_OF_A_LINE):
                yield line
            else:
                time.sleep(LOOK_SECONDS)


def _job(folder: Path) -> tuple[Launcher, dict[str, Any]]:
    """The launcher of a run, and what it noted."""
    file = folder / launch_run.JOB
    try:
        found = storage.read_json(file)
        kind = found.get("kind") if isinstance(found, dict) else None
        note = plugins.find("launch.launchers", str(kind)).Note.model_validate(found).model_dump()
    except FileNotFoundError:
        raise ConfigError(f"{folder} was not started by `lockstep train`: there is no {launch_run.JOB} in it") from None
    except (OSError, ValueError, ConfigError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{file} cannot be used ({reason}): `lockstep train` writes it anew") from None
    recipe = recipes.load(folder / "launch.yaml")
    if recipe.launch.kind != kind:
        raise ConfigError(f"{file} is of launch.kind={kind}, but launch.yaml of {recipe.launch.kind}")
    return launch_run.launcher_of(recipe), note


def _tail(file: Path) -> str:
    try:
        with storage.regular(file) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            return log.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
