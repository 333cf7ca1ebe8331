"""Rank and world size of this process, read from torchrun's environment variables; nothing else reads them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SHARES_GPUS = "LOCKSTEP_SHARE_GPUS"
"""Variable of launch.share_gpus; see base/devices.py."""
OVER_NCCL = "LOCKSTEP_LIVE_NCCL"
"""Variable that the user sets; see `recovers_over_nccl`."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank of a process among all (`rank` of `size`) and on its node (`local_rank` of `local_size`)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    has_agent: bool = False
    """Whether a launcher, ours or torchrun's agent, started this process."""
    shares_gpus: bool = False
    """Whether there may be more processes than GPUs on this node."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes to the terminal and the run folder."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> "World":
        """Read torchrun's variables; without them, a single process."""
        rank, size, local_rank, local_size = LAUNCH_VARIABLES
        return cls(
            rank=int(os.environ.get(rank, 0)),
            size=int(os.environ.get(size, 1)),
            local_rank=int(os.environ.get(local_rank, 0)),
            local_size=int(os.environ.get(local_size, 1)),
            has_agent="TORCHELASTIC_RUN_ID" in os.environ,
            shares_gpus=os.environ.get(SHARES_GPUS) == "1",
        )


def recovers_over_nccl() -> bool:
    """Return whether the user allows launch.recovery=live with a GPU for each process."""
    return os.environ.get(OVER_NCCL) == "1"


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started meanwhile, and restore this process's environment afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
