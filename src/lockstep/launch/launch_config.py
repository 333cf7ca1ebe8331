"""Settings that all launchers share."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.base import devices
from lockstep.base.config import MANY, PluginSection
from lockstep.base.errors import LaunchError, nearest
from lockstep.base.world import LAUNCH_VARIABLES, SHARES_GPUS, cores, recovers_over_nccl
from lockstep.protocol.environment import FLIGHT_RECORDER_EVENTS

MOST_PROCESSES = 4096
"""Limit of processes per machine."""
MAX_PER_CORE = 8
"""Processes per core, or threads of one process: more would only compete."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MISSED_HEARTBEATS = 3
"""Number of missed heartbeats after which a machine counts as lost."""
OWN_VARIABLES = {*LAUNCH_VARIABLES, "MASTER_ADDR", "MASTER_PORT", SHARES_GPUS}
"""Variables that the launcher sets for each process."""


class LaunchSection(PluginSection):
    """Processes on one machine or more."""

    REJOINS: ClassVar[bool] = True
    """Whether a node that was lost may rejoin within join_timeout_seconds."""
    SUBMITS: ClassVar[bool] = False
    """Whether the run is handed to a scheduler, so that the launching command ends before it does."""
    nodes: int | str = 1
    """Number of machines, or MIN:MAX: the run goes on while MIN are left, and lets more join up to MAX."""
    processes: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | Literal["auto"] = "auto"
    """Processes per machine; auto: one per GPU, else as the cores allow at run.threads each, without idle ones."""
    share_gpus: bool = False
    """Whether processes may outnumber the GPUs: for trying and proving on one of them. Slow, since gradients travel
    through the CPU, over Gloo."""
    interface: str | None = None
    """Network interface of Gloo and NCCL, such as eth0; by default the one that routes to the rendezvous."""
    environment: dict[str, str] = {}
    """Further environment variables for every process, such as {NCCL_IB_DISABLE: "1"}."""
    debug: bool = False
    """Debug logs of NCCL and torch.distributed, and a flight recorder dump on a time-out."""
    grace_seconds: int = Field(120, ge=1, le=MANY)
    """After SIGTERM, how long processes may take to finish their step and save before they are killed."""
    failure_timeout_seconds: float = Field(30.0, ge=0.5, le=MANY)
    """A process or machine that sends no heartbeat for this long (frozen, lost) ends or restarts the run."""
    collective_timeout_seconds: float = Field(1800.0, ge=1, le=MANY)
    """A process that waits for the others in a collective for this long gives up, and the run ends or restarts."""
    join_timeout_seconds: float = Field(300.0, gt=0, le=MANY)
    """How long the rendezvous waits for all machines."""
    max_restarts: int = Field(3, ge=0, le=MANY)
    """After the loss of a process, restart from the newest checkpoint, at most this often; 0: never."""
    min_processes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """On one machine, when processes are lost twice with no checkpoint in between, restart with fewer, down to this
    number: with one fewer, or as many as replicas, stages or `parallel.size` need (with live recovery only where they
    are lost before they train)."""

    @field_validator("nodes")
    @classmethod
    def _is_a_range(cls, nodes: int | str) -> int | str:
        match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", str(nodes))
        if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
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
            if name == "NCCL_TIMEOUT":
                raise ValueError(
                    "leave out NCCL_TIMEOUT, which neither NCCL nor PyTorch reads: the timeout of collectives is "
                    "launch.collective_timeout_seconds"
                )
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a zero byte, which no variable can hold")
        return environment

    @property
    def recovers_live(self) -> bool:
        """Whether training goes on where a process is lost."""
        return False

    @property
    def decides_recovery(self) -> bool:
        """Whether the start decides if a lost process ends the step or the run (recovery: auto)."""
        return False

    @property
    def machine_timeout_seconds(self) -> float:
        """Seconds without a heartbeat after which a machine counts as lost."""
        return self.failure_timeout_seconds

    @property
    def min_nodes(self) -> int:
        return int(str(self.nodes).split(":")[0])

    @property
    def max_nodes(self) -> int:
        return int(str(self.nodes).split(":")[-1])

    def variables(self, *, threads: int, logs: Path, interface: str | None = None) -> dict[str, str]:
        """Return the environment of workers with `threads` threads that write traces to `logs`; `interface` is the
        network interface if the settings name none. Sources: torch's tables of its variables, NCCL's user guide."""
        found = {
            "OMP_NUM_THREADS": str(threads),
            # a failed collective ends the process, and its launcher restarts it; with live recovery the process leaves
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0" if self.recovers_live else "1",
        }
        if network := self.interface or interface:
            found |= {"GLOO_SOCKET_IFNAME": network, "NCCL_SOCKET_IFNAME": network}
        if self.debug:
            found |= {
                "NCCL_DEBUG": "INFO",
                "TORCH_DISTRIBUTED_DEBUG": "INFO",  # torch 2.13.0 crashes in DDP on Gloo with DETAIL
                "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDER_EVENTS),
                "TORCH_FR_DUMP_TEMP_FILE": str(logs / "flight-recorder-rank-"),
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            }
        return {**found, **self.environment}

    def check_machine(self, threads: int) -> None:
        """Raise LaunchError if this machine lacks the cores or network interface that the settings ask for."""
        most = MAX_PER_CORE * cores()
        spares = getattr(self, "spares", 0)
        counts = {"run.threads": threads, "launch.processes": self.processes, "launch.spares": spares}
        for key, number in counts.items():
            if number != "auto" and number > most:
                raise LaunchError(
                    f"{key}={number} on the {cores()} cores that may be used here: set it to {cores()} or less"
                )
        import psutil  # noqa: PLC0415 (a config is checked without it)

        interfaces = psutil.net_if_addrs()
        for name in (self.interface or "").split(","):
            if name and name not in interfaces:
                known = ", ".join(sorted(interfaces))
                raise LaunchError(
                    f"launch.interface={self.interface}: this machine has no network interface {name!r}"
                    f"{nearest(name, list(interfaces))} (it has: {known})"
                )

    def processes_here(self, threads: int, shards: int) -> int:
        """Return the number of processes on this machine, with `threads` threads each, for `shards` shards per step.

        Raises LaunchError for more processes than GPUs, and for GPUs with live recovery, unless they are shared.
        """
        gpus = devices.count_gpus()
        if gpus and self.recovers_live and not self.share_gpus and not recovers_over_nccl():
            raise LaunchError(
                "launch.recovery=live is for processors so far: a process that waits in NCCL for a lost one could not "
                "leave it; set launch.recovery=restart, or run.device=cpu"
            )
        if gpus and not self.share_gpus and self.processes != "auto" and self.processes > gpus:
            raise LaunchError(
                f"launch.processes={self.processes} but there {'are' if gpus > 1 else 'is'} {gpus} "
                f"GPU{'s' if gpus > 1 else ''}: set launch.processes={gpus}, or to try several on one GPU, slowly, "
                "launch.share_gpus=true"
            )
        return self.processes_with(gpus=gpus, cores=cores(), threads=threads, shards=shards)

    def processes_with(self, *, gpus: int | None, cores: int, threads: int, shards: int) -> int:
        """Return the number of processes on a machine with so many GPUs or, without any, cores."""
        if self.processes != "auto":
            return self.processes
        return gpus or max(1, min(cores // threads, -(-shards // self.max_nodes)))


class LiveLaunchSection(LaunchSection):
    """Settings of launchers whose runs can go on where a process is lost."""

    recovery: Literal["auto", "restart", "live"] = "auto"
    """After the loss of a process: restart all from the newest checkpoint; or live: the others redo the step without
    it and go on, until it is back (parallel.kind=ddp, and fsdp with replicas). auto: live with spares, and on one
    Linux machine without GPUs where that is possible."""
    heartbeat_seconds: float = Field(1.0, ge=0.2, le=MANY)
    """A process that is stopped for this long, or a machine that is silent for three times as long, counts as lost
    (with live recovery)."""

    spares: int = Field(0, ge=0, le=MOST_PROCESSES)
    """Further processes per machine that wait, with everything loaded, to take a lost one's place at once (live
    recovery)."""

    @model_validator(mode="after")
    def _spares_take_over(self) -> Self:
        if self.spares and self.recovery == "restart":
            raise ValueError(f"spares={self.spares} is for recovery: live, in which a spare takes a lost one's place")
        return self

    @property
    def recovers_live(self) -> bool:
        """Whether training goes on where a process is lost, for sure; with recovery=auto see launch/recovery.py."""
        return self.recovery == "live" or self.spares > 0

    @property
    def decides_recovery(self) -> bool:
        return self.recovery == "auto" and not self.recovers_live

    @property
    def machine_timeout_seconds(self) -> float:
        return MISSED_HEARTBEATS * self.heartbeat_seconds if self.recovers_live else self.failure_timeout_seconds


class JobSection(LiveLaunchSection):
    """Settings of launchers whose runs are jobs of a scheduler, on machines that share the runs' folder."""

    REJOINS: ClassVar[bool] = False
    SUBMITS: ClassVar[bool] = True

    gpus: int | None = Field(None, ge=1, le=2**10)
    """GPUs per machine; launch.processes=auto runs one process on each."""
    cpus: int | None = Field(None, ge=1, le=2**14)
    """CPU cores per machine; by default run.threads for each process. Request more when data.workers load data."""

    def cpus_of(self, threads: int) -> int:
        """Return the CPU cores per machine."""
        processes = self.processes if self.processes != "auto" else self.gpus or 1
        return self.cpus or processes * threads


def submission(job: str, run: Path) -> str:
    """Return what `lockstep train` prints of a job, with the commands for it."""
    return f"submitted as {job}\n  lockstep status {run}\n  lockstep logs {run} -f\n  lockstep cancel {run}\n"
