"""What every launcher can be told about the processes of a run."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from lockstep.base.config import MANY, PluginSection
from lockstep.base.errors import LaunchError, nearest
from lockstep.base.world import LAUNCH_VARIABLES, cores

MOST_PROCESSES = 4096
"""Of one machine."""
CROWD = 8
"""Processes, or threads of one, for each core: more would only wait for each other."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWN_VARIABLES = {*LAUNCH_VARIABLES, "MASTER_ADDR", "MASTER_PORT"}
"""Of which every process gets its own from the launcher."""


class LaunchSection(PluginSection):
    """Processes on one machine or more."""

    REJOINS: ClassVar[bool] = True
    """Whether a machine that was lost may come back within join_timeout_seconds."""
    nodes: int | str = 1
    """How many machines, or MIN:MAX of them: the run goes on as long as MIN are left, and takes in more up to MAX."""
    processes: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | Literal["auto"] = "auto"
    """How many on each; auto: one per GPU, else as many as the cores allow at run.threads each, and as have work."""
    interface: str | None = None
    """Network interface of Gloo and NCCL, such as eth0; by default the one that leads to the rendezvous."""
    environment: dict[str, str] = {}
    """Further variables for every process, such as {NCCL_IB_DISABLE: "1"}."""
    debug: bool = False
    """NCCL and torch.distributed tell what they do, and a time-out dumps a flight recorder."""
    grace_seconds: int = Field(120, ge=1, le=MANY)
    """After SIGTERM, how long processes may take to finish their step and save before they are killed."""
    failure_timeout_seconds: float = Field(30.0, ge=0.5, le=MANY)
    """A process or machine that gives no sign of life for so long (frozen, lost) ends the run, or restarts it."""
    join_timeout_seconds: float = Field(300.0, gt=0, le=MANY)
    """How long machines wait for each other."""
    max_restarts: int = Field(3, ge=0, le=MANY)
    """After the loss of a process, start again from the newest checkpoint, at most so often; 0: never."""
    min_processes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """On one machine, when processes are lost twice with no checkpoint in between, go on with one fewer; down to so
    many."""

    @field_validator("nodes")
    @classmethod
    def _is_a_range(cls, nodes: int | str) -> int | str:
        found = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", str(nodes))
        if not found or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise ValueError("should be a number of machines, or MIN:MAX, such as 1:4")
        return nodes

    @field_validator("environment")
    @classmethod
    def _can_be_set(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} cannot be the name of a variable: letters, digits and '_'")
            if name in OWN_VARIABLES:
                raise ValueError(f"leave out {name}: the launcher sets it, for each process its own")
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a zero byte, which no variable can")
        return environment

    @property
    def min_nodes(self) -> int:
        """The fewest machines that the run goes on with."""
        return int(str(self.nodes).split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most machines that it takes in."""
        return int(str(self.nodes).split(":")[-1])

    def check_machine(self, threads: int) -> None:
        """Raise LaunchError where this machine cannot run processes of `threads` threads as they are asked for."""
        most = CROWD * cores()
        for what, number in (("run.threads", threads), ("launch.processes", self.processes)):
            if number != "auto" and number > most:
                raise LaunchError(
                    f"{what}={number} on the {cores()} cores that may be used here: set it to {cores()} or less"
                )
        import psutil  # noqa: PLC0415 (a config is checked without it)

        there = psutil.net_if_addrs()
        for name in (self.interface or "").split(","):
            if name and name not in there:
                known = ", ".join(sorted(there))
                raise LaunchError(
                    f"launch.interface={self.interface}: this machine has no network interface {name!r}"
                    f"{nearest(name, list(there))} (it has: {known})"
                )

    def processes_here(self, threads: int, shards: int) -> int:
        """How many processes this machine runs, of `threads` threads each, when a step has so many micro-batches.

        Raises LaunchError for more processes than GPUs.
        """
        import torch  # noqa: PLC0415 (a config is checked without it)

        gpus = torch.cuda.device_count()
        if gpus and self.processes != "auto" and self.processes > gpus:
            raise LaunchError(
                f"launch.processes={self.processes} but there are {gpus} GPUs: set launch.processes={gpus}"
            )
        if self.processes != "auto":
            return self.processes
        if gpus:
            return gpus
        return max(1, min(cores() // threads, -(-shards // self.max_nodes)))
