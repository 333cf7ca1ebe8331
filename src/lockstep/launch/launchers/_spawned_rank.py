"""What a spawned process does before it is a worker: takes its place, its output, its signals."""

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.base import ctrl_c, storage
from lockstep.base.errors import Interrupted, PeerLost
from lockstep.launch.launchers._output_pipe import Outlet

COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""With these a notebook claims to be a terminal, but no bar can move in what comes through a pipe."""


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """What all processes of a run are told."""

    argv: tuple[str, ...]
    """The module to run, and its arguments."""
    logs: Path
    parent: int
    """The process that looks after them."""
    outlets: Mapping[int, Outlet]
    """Where rank 0's file descriptors lead, where not to the parent's own."""


def run(rank: int, start: RankStart) -> None:
    """Be that rank, to the end."""
    ctrl_c.exit_silently(Interrupted.exit_code)
    signal.signal(signal.SIGTERM, _leave)  # as long as there is nothing to save; the worker takes over
    if os.getppid() != start.parent:  # it went before it could be noticed that it goes
        os._exit(PeerLost.exit_code)
    try:
        error = str(error_file(start.logs, rank))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error}
        _connect(rank, start)
        sys.argv = list(start.argv)
        runpy.run_module(start.argv[0], run_name="__main__", alter_sys=True)
    except Exception:  # torch would hand it to whoever asks by its own way
        traceback.print_exc()
        sys.exit(1)


def error_file(logs: Path, rank: int) -> Path:
    """Where a rank leaves the exception that has ended it."""
    return logs / f".error-{rank}.json"


def _leave(*_: object) -> NoReturn:
    os._exit(Interrupted.exit_code)


def _connect(rank: int, start: RankStart) -> None:
    """Lead output to where it belongs, also that of native code."""
    if rank:
        with storage.append(start.logs / f"rank-{rank}.log") as log:
            _redirect({1: log.fileno(), 2: log.fileno()})
    else:
        _redirect({descriptor: outlet.writer for descriptor, outlet in start.outlets.items()})
        if 1 in start.outlets:
            for name in COLOURS:
                os.environ.pop(name, None)
    for outlet in start.outlets.values():
        os.close(outlet.writer)


def _redirect(to: Mapping[int, int]) -> None:
    """Python's streams are made anew: they have been fitted to what the descriptors were before."""
    for descriptor, target in to.items():
        os.dup2(target, descriptor)
        stream = open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, {1: "stdout", 2: "stderr"}[descriptor], stream)
