"""A job of Slurm: an sbatch script that is written into the run's folder and handed in."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lockstep.base.config import MANY
from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import LaunchError
from lockstep.launch.elastic.environment import environment
from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.launchers._batch_script import Script

TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]+(:[0-9]{2}){0,2}")
ASK_SECONDS = 60
"""How long the controller may take to answer."""


class Config(LaunchSection):
    """A job of Slurm, which goes back to the queue when its time is over, or its place is needed for another."""

    REJOINS: ClassVar[bool] = False

    partition: str | None = None
    """Where to queue; by default the cluster's own choice."""
    account: str | None = None
    """Whose budget."""
    time: str | None = None
    """Time limit as Slurm writes it: minutes, H:MM:SS or D-HH:MM:SS. The run goes on in a new one until it is done."""
    gpus: int | None = Field(None, ge=1, le=2**10)
    """GPUs of each machine; launch.processes=auto runs one process on each."""
    cpus: int | None = Field(None, ge=1, le=2**14)
    """Cores of each machine; by default run.threads for each process. Ask for more where data.workers have to load."""
    memory: str | None = None
    """Of each machine, as Slurm writes it: 64G."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, as they are: [--constraint=a100, --exclusive]."""
    modules: tuple[str, ...] = ()
    """What to `module load`."""
    setup: tuple[str, ...] = ()
    """Further lines of shell before the run, as they are."""
    container: str | None = None
    """Image to run in; Lockstep has to be installed there."""
    container_kind: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: srun --container-image, by Enroot; apptainer: apptainer exec."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees, besides that of the runs: [/data, "/scratch/me:/tmp"]."""
    warning_seconds: int = Field(120, ge=1, le=10**6)
    """How long before the time limit the run saves and ends; Slurm's clock is coarse, and may be a minute early."""
    requeues: int = Field(100, ge=0, le=MANY)
    """How often the job may go back to the queue."""

    @field_validator("time", mode="before")
    @classmethod
    def _is_a_time(cls, value: Any) -> Any:
        if value is not None and not TIME.fullmatch(str(value)):
            raise ValueError("should be minutes, H:MM:SS or D-HH:MM:SS")
        return None if value is None else str(value)


class Note(BaseModel):
    """What is noted of a job in the run's folder."""

    model_config = ConfigDict(strict=True)

    job: str = Field(pattern=r"^[0-9][0-9_]*$", max_length=64)


class Slurm:
    """Hands runs in, and asks about them."""

    def __init__(self, config: Config, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards
        self.job = os.environ.get("SLURM_JOB_ID")
        """Of the job that this process is in, or has handed in."""

    def plan(self, request: Request) -> Plan:
        """The script, and the command that hands it in."""
        file = request.folder / "train.slurm"
        return Plan(
            argv=("sbatch", "--parsable", str(file)),
            environment=environment(self.config, threads=self.threads, logs=request.folder / "logs"),
            files={file: self._script(request).text()},
        )

    def run(self, plan: Plan, logs: Path) -> int:
        """Hand the script in; returns 0. Raises LaunchError with what sbatch has to say."""
        logs.mkdir(parents=True, exist_ok=True)  # sbatch's output goes there, and it makes no folders
        self.job = asked(*plan.argv).split(";")[0].strip()
        run = logs.parent
        sys.stdout.write(
            f"handed in as job {self.job} of Slurm, by {plan.argv[-1]}\n"
            f"  lockstep status {run}\n  lockstep logs {run} -f\n  lockstep cancel {run}\n"
        )
        return 0

    def note(self) -> dict[str, Any]:
        return {"job": self.job} if self.job else {}

    def status(self, note: Mapping[str, Any]) -> str:
        found = _queued(note)
        if found is None:
            return f"job {note['job']} has left Slurm's queue"
        state, used, left, why, nodes = found
        if state == "PENDING":
            return f"job {note['job']} waits in Slurm's queue ({why})"
        return f"job {note['job']} of Slurm: {state.lower()} on {nodes} for {used}, {left} left"

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Warn it, so that it saves, and keep it from going back to the queue; one that waits is taken out."""
        found = _queued(note)
        if found is None:
            raise LaunchError(f"job {note['job']} has left Slurm's queue already")
        if found[0] != "RUNNING":
            asked("scancel", note["job"])
            return f"took job {note['job']} out of Slurm's queue"
        asked("scontrol", "update", f"JobId={note['job']}", "Requeue=0")
        asked("scancel", "--batch", "--signal=USR1", note["job"])
        return f"asked job {note['job']} to save and end; at once: scancel {note['job']}"

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        return logs / f"slurm-{note['job']}.out"

    # ---- the script

    def _script(self, request: Request) -> Script:
        srun, command = self._inside(request.folder.parent)
        config = self.config
        return Script(
            opening=[f"Trains {request.folder}. Written by `lockstep train`, handed in with sbatch."],
            options=self._options(request.folder),
            setup=[*(f"module load {shlex.quote(name)}" for name in config.modules), *config.setup],
            srun=srun,
            command=command,
            arguments=shlex.join([str(request.recipe), *request.arguments]),
            requeues=config.requeues,
        )

    def _inside(self, runs: Path) -> tuple[list[str], str]:
        """Options of srun, and the command of a task, for what it runs in."""
        config = self.config
        srun = ["--no-kill"] if config.min_nodes < config.max_nodes else []
        if config.container is None:
            return srun, f"{sys.executable} -P -m lockstep"
        mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in (str(runs), *config.mounts)]
        if config.container_kind == "pyxis":
            srun.append(shlex.quote(f"--container-image={config.container}"))
            srun.append(shlex.quote(f"--container-mounts={','.join(mounts)}"))
            return srun, "lockstep"
        gpus = " --nv" if config.gpus else ""
        return srun, f'apptainer exec{gpus} --bind "{",".join(mounts)}" "{config.container}" lockstep'

    def _options(self, folder: Path) -> dict[str, str | None]:
        config = self.config
        processes = config.processes if config.processes != "auto" else config.gpus or 1
        values = {
            "job-name": folder.name,
            "nodes": str(config.nodes).replace(":", "-"),
            "ntasks-per-node": 1,
            "cpus-per-task": config.cpus or processes * self.threads,
            "gres": f"gpu:{config.gpus}" if config.gpus else None,
            "mem": config.memory,
            "time": config.time,
            "partition": config.partition,
            "account": config.account,
            "signal": f"B:USR1@{config.warning_seconds}",
            "open-mode": "append",
            "output": folder / "logs" / "slurm-%j.out",
        }
        switches = ["requeue", *(["no-kill"] if config.min_nodes < config.max_nodes else [])]
        given = [option.removeprefix("--") for option in config.options]
        found: dict[str, str | None] = {name: str(value) for name, value in values.items() if value is not None}
        return found | dict.fromkeys([*switches, *given])


def _queued(note: Mapping[str, Any]) -> list[str] | None:
    """State, time used, time left, reason and machines of a job; None for one that the queue no longer knows."""
    try:
        said = asked("squeue", "--noheader", f"--jobs={note['job']}", "--format=%T|%M|%L|%r|%N").strip()
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return said.splitlines()[0].split("|") if said else None


def asked(*command: str) -> str:
    """What a command of Slurm's answers. Raises LaunchError with its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {command[0]} here: launch.kind=slurm is for a machine where Slurm's commands are installed, "
            "such as a cluster's login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Slurm did not answer `{shlex.join(command)}` within {ASK_SECONDS} s") from None
    if done.returncode:
        raise LaunchError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def build(config: Config, *, threads: int, shards: int) -> Slurm:
    """The launcher; `threads` is how many each process may use."""
    return Slurm(config, threads=threads, shards=shards)
