"""The entry point of a spawned worker: sets up its environment, output and signals, then runs the worker module."""

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
from lockstep.launch.launchers._output_pipe import OutputPipe

COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables by which a notebook claims to be a terminal; but a progress bar cannot be redrawn through a pipe."""


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """Arguments of all workers of a run."""

    argv: tuple[str, ...]
    """The module to run, and its arguments."""
    logs: Path
    parent: int
    """The id of the supervising process."""
    pipes: Mapping[int, OutputPipe]
    """Rank 0's file descriptor -> pipe; the others are inherited from the parent."""


def run(rank: int, start: RankStart) -> None:
    """Run the worker module as this rank."""
    ctrl_c.exit_silently(Interrupted.exit_code)
    signal.signal(signal.SIGTERM, _leave)  # until the worker installs its own handler: there is nothing to save yet
    if os.getppid() != start.parent:  # it ended before PR_SET_PDEATHSIG was set
        os._exit(PeerLost.exit_code)
    try:
        error = str(error_file(start.logs, rank))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error}
        _redirect_output(rank, start)
        sys.argv = list(start.argv)
        runpy.run_module(start.argv[0], run_name="__main__", alter_sys=True)
    except Exception:  # torch.multiprocessing would pickle it for its own join()
        traceback.print_exc()
        sys.exit(1)


def error_file(logs: Path, rank: int) -> Path:
    """Return the file in which a rank records its exception."""
    return logs / f".error-{rank}.json"


def _leave(*_: object) -> NoReturn:
    os._exit(Interrupted.exit_code)


def _redirect_output(rank: int, start: RankStart) -> None:
    """Redirect output, also that of native code: to the rank's log, or through rank 0's pipes."""
    if rank:
        with storage.append(start.logs / f"rank-{rank}.log") as log:
            _redirect({1: log.fileno(), 2: log.fileno()})
    else:
        _redirect({descriptor: pipe.writer for descriptor, pipe in start.pipes.items()})
        if 1 in start.pipes:
            for name in COLOURS:
                os.environ.pop(name, None)
    for pipe in start.pipes.values():
        os.close(pipe.writer)


def _redirect(to: Mapping[int, int]) -> None:
    """Replace file descriptors, and Python's streams, whose buffering depends on what the descriptor was."""
    for descriptor, target in to.items():
        os.dup2(target, descriptor)
        stream = open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, {1: "stdout", 2: "stderr"}[descriptor], stream)
