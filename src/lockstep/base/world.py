"""Which process this is, as torchrun names it: the one place that reads the launcher's environment."""

import os
from dataclasses import dataclass

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class World:
    """A process's place: `rank` in 0..size-1 over all nodes, `local_rank` in 0..local_size-1 on this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    has_agent: bool = False
    """Whether an elastic agent has started this process and looks after it."""

    @property
    def is_main(self) -> bool:
        """True on the one process that writes to the terminal and to the run directory."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> "World":
        """The world that torchrun's variables describe; one lone process when they are not set."""
        rank, size, local_rank, local_size = (
            int(os.environ.get(name, default)) for name, default in zip(LAUNCH_VARIABLES, (0, 1, 0, 1), strict=True)
        )
        has_agent = "TORCHELASTIC_RUN_ID" in os.environ
        return cls(rank=rank, size=size, local_rank=local_rank, local_size=local_size, has_agent=has_agent)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
