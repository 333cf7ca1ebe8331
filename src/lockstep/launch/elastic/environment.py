"""The environment variables of every worker: all are set here and shown by --dry-run."""

import os
import sys
from pathlib import Path

from lockstep.launch.launch_config import LaunchSection

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


def environment(section: LaunchSection, *, threads: int, logs: Path, interface: str | None = None) -> dict[str, str]:
    """Return variables for workers with `threads` threads that write traces to `logs`; `interface` is the network
    interface if the section names none. Sources: torch's tables of its environment variables, NCCL's user guide."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        # a failed collective ends the process, and its launcher restarts it; with live recovery the process leaves it
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0" if section.recovers_live else "1",
    }
    if network := section.interface or interface:
        variables |= {"GLOO_SOCKET_IFNAME": network, "NCCL_SOCKET_IFNAME": network}
    if section.debug:
        variables |= {
            "NCCL_DEBUG": "INFO",
            "TORCH_DISTRIBUTED_DEBUG": "INFO",  # torch 2.13.0 crashes in DDP on Gloo with DETAIL
            "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDER_EVENTS),
            "TORCH_FR_DUMP_TEMP_FILE": str(logs / "flight-recorder-rank-"),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        }
    return {**variables, **section.environment}
