"""What becomes of a run that was started: where it is, what it says, and how to end it."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep import launching
from lockstep import recipe as recipes
from lockstep.checkpoint.layout import listed
from lockstep.contracts import Launcher
from lockstep.errors import ConfigError, LaunchError

LOOK_SECONDS = 0.2
STEP = re.compile(r"^step [0-9]+/[0-9]+ .*$", re.MULTILINE)
TAIL_BYTES = 1 << 16


def status(folder: Path) -> list[str]:
    """What there is to say of a run, a line each. Raises ConfigError where there is none."""
    launcher, note = _job(folder)
    lines = [launcher.status(note)]
    if said := STEP.findall(_tail(folder / "logs" / "rank-0.log")):
        lines.append(said[-1])
    if saved := listed(folder / "checkpoints"):
        lines.append(f"newest checkpoint: {saved[0].name}")
    if (folder / "summary.json").is_file():
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        lines.append(f"{summary['status']} after {summary['steps']} steps · digest {str(summary['digest'])[:16]}")
    return lines


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
    if not follows and not file.is_file():
        there = ", ".join(sorted(p.name for p in logs.glob("*") if p.is_file())) or "nothing"
        raise LaunchError(f"there is no {file} yet; in {logs} there is: {there}")
    while not file.is_file():
        time.sleep(LOOK_SECONDS)
    with file.open(encoding="utf-8", errors="replace", newline="\n") as text:
        yield from text
        while follows:
            if line := text.readline():
                yield line
            else:
                time.sleep(LOOK_SECONDS)


def _job(folder: Path) -> tuple[Launcher, dict[str, Any]]:
    """The launcher of a run, and what it noted."""
    try:
        note = json.loads((folder / launching.JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{folder} was not started by `lockstep train`: there is no {launching.JOB} in it") from None
    return launching.launcher_of(recipes.load(folder / "launch.yaml")), note


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
