"""Slurm jobs: an sbatch script written into the run's folder and submitted."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from lockstep.base.config import MANY
from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import LaunchError, few
from lockstep.launch.launch_config import JobSection, submission

TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]+(:[0-9]{2}){0,2}")
VARIABLE = re.compile(r"\$([A-Za-z_]|\{)")
COMMAND_TIMEOUT_SECONDS = 60
"""How long the Slurm controller may take to answer."""
EXAMINATION_MINUTES = 10
HEAD = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
PORT = "$((20000 + SLURM_JOB_ID % 10000))"
"""The first node hosts the rendezvous; the port follows from the job's number, so that two on a node rarely collide."""
JOIN = "join.slurm"
"""Script in the run's folder, with live recovery, for a node that joins."""
JOINED_JOB = "LOCKSTEP_JOINED_JOB"
"""Variable of a node that has joined: the job of the run."""
OF_THE_WHOLE_JOB = re.compile(r"(--)?(nodelist|nodefile|nodes|dependency|begin|array)\b")
"""Options of sbatch that do not apply to a further node."""
JOIN_HEADER = "Takes the place of a lost node: submitted by the run, with its job, the node's rank and the rendezvous."
Line = Annotated[str, StringConstraints(pattern=r"^[^\r\n]*$")]
"""Text for an #SBATCH line, which a line break would end."""


class Config(JobSection):
    """A Slurm job, requeued when its time limit is reached or another job preempts it."""

    partition: Line | None = None
    """Partition to queue in; by default the cluster's."""
    account: Line | None = None
    """Account to charge."""
    time: str | None = None
    """Time limit in Slurm's notation: minutes, H:MM:SS or D-HH:MM:SS. A requeued run continues with a new limit."""
    memory: Line | None = None
    """Memory per node in Slurm's notation: 64G."""
    options: tuple[Line, ...] = ()
    """Further sbatch options, verbatim: [--constraint=a100, --exclusive]."""
    modules: tuple[str, ...] = ()
    """Environment modules to `module load`."""
    setup: tuple[str, ...] = ()
    """Further shell lines before the run, verbatim."""
    container: str | None = None
    """Container image to run in; Lockstep has to be installed in it."""
    container_kind: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: srun --container-image, by Enroot; apptainer: apptainer exec."""
    mounts: tuple[str, ...] = ()
    """Folders to mount in the container, besides the folder of the runs: [/data, "/scratch/me:/tmp"]."""
    warning_seconds: int = Field(120, ge=1, le=10**6)
    """How long before the time limit the run saves and stops; Slurm's clock is coarse and may be a minute early."""
    requeues: int = Field(100, ge=0, le=MANY)
    """How often the job may be requeued."""

    @field_validator("time", mode="before")
    @classmethod
    def _is_a_time(cls, value: Any) -> Any:
        if value is not None and not TIME.fullmatch(str(value)):
            raise ValueError("should be minutes, H:MM:SS or D-HH:MM:SS")
        return None if value is None else str(value)


class Note(BaseModel):
    """Record of a Slurm job in job.json in the run's folder."""

    model_config = ConfigDict(strict=True)

    job: str = Field(pattern=r"^[0-9][0-9_]*$", max_length=64)


class Slurm:
    """Submits runs to Slurm and queries them."""

    def __init__(self, config: Config, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards
        self.job = os.environ.get("SLURM_JOB_ID")
        """The job that this process runs in, or has submitted."""

    def plan(self, request: Request) -> Plan:
        """Plan the script, and the command that submits it. Raises LaunchError."""
        file = request.folder / "train.slurm"
        files = {file: self._script(request)}
        if self.config.recovers_live:
            files[request.folder / JOIN] = self._script(request, joins=True)
        return Plan(
            argv=("sbatch", "--parsable", str(file)),
            environment=self.config.variables(threads=self.threads, logs=request.folder / "logs"),
            files=files,
            warnings=(*_short_time(self.config), *_not_mounted(self.config, request)),
        )

    def run(self, plan: Plan, logs: Path) -> int:
        """Submit the script; returns 0. Raises LaunchError with sbatch's complaint."""
        logs.mkdir(parents=True, exist_ok=True)  # sbatch writes its output there but creates no folders
        self.job = run_command(*plan.argv).split(";")[0].strip()
        sys.stdout.write(submission(f"Slurm job {self.job}, from {plan.argv[-1]}", logs.parent))
        return 0

    def note(self) -> dict[str, Any]:
        return {"job": self.job} if self.job else {}

    def status(self, note: Mapping[str, Any]) -> str:
        job = _queued_job(note)
        if job is None:
            return f"job {note['job']} has left Slurm's queue"
        state, used, left, reason, nodes = job
        if state == "PENDING":
            return f"job {note['job']} is pending in Slurm's queue ({reason})"
        return f"Slurm job {note['job']}: {state.lower()} on {nodes} for {used}, {left} left"

    def is_over(self, note: Mapping[str, Any]) -> bool:
        return _queued_job(note) is None  # a requeued one stays in the queue

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Signal a running job to save, and disable its requeue; remove a pending one from the queue."""
        job = _queued_job(note)
        if job is None:
            raise LaunchError(f"job {note['job']} has left Slurm's queue already")
        if job[0] != "RUNNING":
            run_command("scancel", note["job"])
            return f"removed job {note['job']} from Slurm's queue"
        run_command("scontrol", "update", f"JobId={note['job']}", "Requeue=0")
        run_command("scancel", "--batch", "--signal=USR1", note["job"])
        return f"signalled job {note['job']} to save and stop; to stop it at once: scancel {note['job']}"

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        return logs / f"slurm-{note['job']}.out"

    # ---- the script

    def _script(self, request: Request, *, joins: bool = False) -> str:
        """Render the script of the job, or of one for a node that `joins` in the place of a lost one."""
        from lockstep.base.templates import render  # noqa: PLC0415 (a config is checked without Jinja2)

        config, folder = self.config, request.folder
        if len(str(folder).splitlines()) > 1:
            raise LaunchError(f"{str(folder)!r}: sbatch takes no path with a line break; set another run.dir")
        is_elastic = config.min_nodes < config.max_nodes or config.recovers_live
        srun_options, command = _container(config, folder.parent)
        no_kill = ["--no-kill"] if is_elastic and not joins else []
        return render(
            "launch/launchers/slurm_join.sh.j2" if joins else "launch/launchers/slurm.sh.j2",
            config=config,
            header=JOIN_HEADER if joins else f"Trains {folder}. Written by `lockstep train`, submitted with sbatch.",
            job_name=folder.name,
            nodes=str(config.nodes).replace(":", "-"),
            cpus=config.cpus_of(self.threads),
            output=folder / "logs" / "slurm-%j.out",
            is_elastic=is_elastic,
            options=[
                option.removeprefix("--") for option in config.options if not (joins and OF_THE_WHOLE_JOB.match(option))
            ],
            joined_job=JOINED_JOB,
            srun_options=[*no_kill, *map(quote, srun_options)],
            command=command,
            arguments=shlex.join([str(request.recipe), *request.arguments]),
            quote=quote,
        )


def quote(value: object) -> str:
    """Quote a value as one shell word; sbatch parses #SBATCH lines by the same quoting rules."""
    return shlex.quote(str(value))


def _expanding_word(value: str) -> str:
    """Quote a value as one shell word in which $NAME and ${NAME} are expanded by the job's shell."""
    if not VARIABLE.search(value):
        return shlex.quote(value)
    escaped = re.sub(r'["`\\]|\$(?![A-Za-z_{])', r"\\\g<0>", value)
    return f'"{escaped}"'


def _queued_job(note: Mapping[str, Any]) -> list[str] | None:
    """Return state, time used, time left, reason and nodes of a job; None once it has left the queue."""
    try:
        answer = run_command("squeue", "--noheader", f"--jobs={note['job']}", "--format=%T|%M|%L|%r|%N").strip()
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return answer.splitlines()[0].split("|") if answer else None


def run_command(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's commands -> its output. Raises LaunchError with its complaint."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": COMMAND_TIMEOUT_SECONDS, "check": False}
    try:
        done = subprocess.run(command, env=environment, **how)
    except FileNotFoundError:
        raise _absent(command[0]) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Slurm did not answer `{shlex.join(command)}` within {COMMAND_TIMEOUT_SECONDS} s") from None
    if done.returncode:
        raise LaunchError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _short_time(config: Config) -> Iterator[str]:
    days, _, clock = (config.time or "0").rpartition("-")
    parts = [*map(int, clock.split(":"))]
    # after days hours come first; else minutes do, unless there are three
    hours, minutes, seconds = [*(parts if days or len(parts) == 3 else [0, *parts]), 0, 0][:3]
    limit = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if 0 < limit <= config.warning_seconds:
        yield (
            f"launch.time={config.time} is not above launch.warning_seconds={config.warning_seconds}, how long before "
            "its end a job stops: it would not train; raise launch.time"
        )


def _not_mounted(config: Config, request: Request) -> Iterator[str]:
    """Warn of files and folders of the recipe that are not at their place in the container."""
    if config.container is None:
        return
    mounts = [Path(os.path.expandvars(mount.split(":")[:2][-1])) for mount in config.mounts]
    mounts += [request.folder.parent]
    if config.container_kind == "apptainer":  # it mounts these by default
        mounts += [Path.home(), Path.cwd(), Path("/tmp")]
    recipe = yaml.safe_load(request.text) or {}
    sections = [values for name, values in recipe.items() if name not in ("run", "launch")]
    paths = [Path(each) for each in _texts(sections) if each.startswith("/") and os.path.exists(each)]
    outside = [path for path in paths if not any(path.is_relative_to(mount) for mount in mounts)]
    if outside:
        yield f"{few(outside)} would not be in the container: add the folders to launch.mounts"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(each) if key != "cache" else ()
    elif isinstance(value, str):
        yield value


def _absent(command: str) -> LaunchError:
    return LaunchError(
        f"there is no {command} here: launch.kind=slurm is for a machine where Slurm's commands are installed, such as "
        "a cluster's login node"
    )


def replace_node(folder: Path, node_rank: int, rendezvous: str) -> str:
    """Submit a job for a node in the place of a lost one. See contracts.HOOKS."""
    job = os.environ.get(JOINED_JOB) or os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise LaunchError("its launcher was not started by a Slurm job")
    if shutil.which("sbatch") is None:
        raise LaunchError("sbatch is not installed on the nodes, or not in the container")
    of_this_job = {name for name in os.environ if name.startswith("SLURM_")} - {"SLURM_CONF"}
    variables = {name: value for name, value in os.environ.items() if name not in of_this_job}
    command = ["sbatch", "--parsable", "--nodes=1", f"--job-name=join-{job}", str(folder / JOIN)]
    answer = run_command(*command, job, str(node_rank), rendezvous, environment=variables)
    return f"Slurm job {answer.split(';')[0].strip()} takes its place once it starts"


def on_nodes(config: Config, threads: int, words: Sequence[str]) -> tuple[str, ...]:
    """Return srun with the resources of a run, except its time limit. See contracts.HOOKS. Raises LaunchError."""
    if shutil.which("srun") is None:
        raise _absent("srun")
    in_container, command = _container(config, Path.cwd())
    options = [f"--nodes={config.max_nodes}", "--ntasks-per-node=1", f"--cpus-per-task={config.cpus_of(threads)}"]
    options += [f"--time={EXAMINATION_MINUTES}", "--job-name=lockstep-doctor", *in_container]
    given = {"gres": config.gpus and f"gpu:{config.gpus}", "mem": config.memory, "partition": config.partition}
    given["account"] = config.account
    options += [f"--{name}={value}" for name, value in given.items() if value]
    setup = [f"module load {quote(name)}" for name in config.modules] + list(config.setup)
    script = "\n".join([*setup, f'exec {command} "$@" --node-rank "$SLURM_NODEID" --rendezvous "{HEAD}:{PORT}"'])
    options += [f"--{option.removeprefix('--')}" for option in config.options]
    return ("srun", *options, "bash", "-c", script, "lockstep", *words)


def _container(config: Config, runs: Path) -> tuple[list[str], str]:
    """Return options of srun and the shell command that runs Lockstep, on the host or in a container."""
    if config.container is None:
        return [], shlex.join([sys.executable, "-P", "-m", "lockstep"])
    mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in (str(runs), *config.mounts))
    if config.container_kind == "pyxis":
        return [f"--container-image={config.container}", f"--container-mounts={mounts}"], "lockstep"
    gpus = ["--nv"] if config.gpus else []
    words = (_expanding_word(word) for word in (mounts, config.container))
    return [], " ".join(["apptainer exec", *gpus, "--bind", *words, "lockstep"])


build = Slurm
