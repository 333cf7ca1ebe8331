"""Environment variables that torch reads, and those by which a process knows what has started it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.base.world import environment

CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
RUN_ID = "lockstep-launcher"
"""TORCHELASTIC_RUN_ID of Lockstep's launchers: MASTER_PORT is that of a store that asks for the run's secret."""
FLIGHT_RECORDER_EVENTS = 2000
"""Events kept per process: a few steps of a deep model."""


def set_threads(threads: int) -> None:
    """Set OpenMP's number of threads before torch is imported, so that workers can be forked from this process."""
    if "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def quieten_torch() -> None:
    """Hide warnings of torch's C++ code, which live recovery causes where it gives up a process group; before torch is
    imported, so that workers that are forked from this process have it."""
    if "torch" not in sys.modules:
        os.environ.setdefault(CPP_LOG_LEVEL, "ERROR")


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process as one of several."""
    return os.environ.get("TORCHELASTIC_RUN_ID", RUN_ID) != RUN_ID and os.environ.get("WORLD_SIZE", "1") != "1"


@contextmanager
def importing_from(folders: Sequence[Path]) -> Iterator[None]:
    """Have the processes that are started or forked in this context look for modules in these folders first."""
    path, known = sys.path[:], os.environ.get("PYTHONPATH")
    sys.path[:0] = map(str, folders)
    try:
        with environment({"PYTHONPATH": os.pathsep.join([*map(str, folders), *([known] if known else [])])}):
            yield
    finally:
        sys.path[:] = path
