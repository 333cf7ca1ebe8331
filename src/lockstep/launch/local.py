"""Processes on this machine, through PyTorch's elastic agent, in this process."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.config import PluginSection
from lockstep.contracts import Plan
from lockstep.errors import Interrupted, LaunchError

TAIL_LINES = 20
KILLED = [-getattr(signal, name) for name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS") if hasattr(signal, name)]


class Config(PluginSection):
    """Processes on this machine."""

    processes: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """How many; auto: one per GPU, else as many as the cores allow at run.threads each, and as have work."""
    grace_seconds: int = Field(30, ge=1)
    """After SIGTERM, how long processes may take to finish their step and save before they are killed."""


class Local:
    """One node: this one."""

    def __init__(self, config: Config, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards

    def plan(self, recipe: Path, arguments: tuple[str, ...] = ()) -> Plan:
        """The worker command and how many of it; raises LaunchError for more processes than GPUs."""
        gpus = torch.cuda.device_count()
        wanted = self.config.processes
        processes = (gpus or self._fitting()) if wanted == "auto" else wanted
        if gpus and processes > gpus:
            raise LaunchError(f"launch.processes={processes} but there are {gpus} GPUs: set launch.processes={gpus}")
        return Plan(
            argv=(sys.executable, "-m", "lockstep.worker", str(recipe), *arguments),
            processes=processes,
            environment={"OMP_NUM_THREADS": str(self.threads)},
        )

    def _fitting(self) -> int:
        """As many as this process's cores carry and a step has micro-batches for."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(cores // self.threads, self.shards))

    def run(self, plan: Plan, logs: Path) -> int:
        """Run the plan to its end and return the exit code: 0, or the one of the first process that failed.

        Rank 0 writes to the terminal, the others to logs/rank-N.log. Raises Interrupted after SIGINT or SIGTERM,
        once every process has ended.
        """
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        os.environ.update(plan.environment)
        logs.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("rank-*.log"):
            if log.name != "rank-0.log":  # which is continued
                log.replace(log.with_suffix(".log.before"))
        for last_word in logs.glob(".error-*.json"):
            last_word.unlink()
        signals = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1") if hasattr(signal, name)]
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=plan.processes,
            run_id="lockstep",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=RankLogs(logs),
            signals_to_handle=",".join(signals),
            shutdown_timeout=self.config.grace_seconds,
        )
        try:
            elastic_launch(config, plan.argv[0])(*plan.argv[1:])
        except ChildFailedError as error:
            return _explained(error, logs)
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            raise Interrupted(f"ended by {name}") from None
        return 0


class RankLogs(LogsSpecs):
    """logs/rank-N.log for every rank but 0, which keeps the terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for each local rank; an empty name leaves the terminal."""
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        paths = {local: str(self.folder / f"rank-{rank}.log") if rank else "" for local, rank in ranks.items()}
        nothing = dict.fromkeys(envs, "")
        errors = {local: str(self.folder / f".error-{rank}.json") for local, rank in ranks.items()}
        return LogsDest(paths, paths, nothing, nothing, errors)


def _explained(error: ChildFailedError, logs: Path) -> int:
    """One message for people; the exit code for programs. A process that was killed comes before those who lost it:
    times are whole seconds, and its own is when the agent noticed."""
    rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode not in KILLED, item[1].timestamp))
    if failure.exitcode in (2, 3, Interrupted.exit_code) and (rank == 0 or not Path(failure.error_file).is_file()):
        return failure.exitcode  # rank 0 has said what is wrong
    how = (
        f"signal {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    )
    lines = [f"rank {rank} (process {failure.pid}) ended with {how}"]
    log = logs / f"rank-{rank}.log"
    if rank and log.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        lines += [f"last lines of {log}:", *(f"  | {line}" for line in tail)] if tail else []
    lines.append("The other processes were ended too.")
    if any((logs.parent / "checkpoints").glob("step-*/manifest.json")):
        lines.append(f"Go on from the newest checkpoint with: lockstep train {logs.parent / 'recipe.yaml'}")
    sys.stderr.write("\n".join(lines) + "\n")
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def build(config: Config, *, threads: int, shards: int) -> Local:
    """The launcher; `threads` is how many each process may use, `shards` how many processes can find work."""
    return Local(config, threads=threads, shards=shards)
