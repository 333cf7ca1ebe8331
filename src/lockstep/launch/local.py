"""Processes on this machine, through PyTorch's elastic agent, in this process; started again when one is lost."""

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import psutil
import torch
from pydantic import Field
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.config import PluginSection
from lockstep.contracts import Plan
from lockstep.errors import Interrupted, LaunchError
from lockstep.launch._failure import VERDICT, Failure, failure_of, oom_kills


class Config(PluginSection):
    """Processes on this machine."""

    processes: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """How many; auto: one per GPU, else as many as the cores allow at run.threads each, and as have work."""
    grace_seconds: int = Field(120, ge=1)
    """After SIGTERM, how long processes may take to finish their step and save before they are killed."""
    failure_timeout_seconds: float = Field(30.0, gt=0)
    """A process that gives no sign of life for so long (frozen, its machine lost) ends the run, or restarts it."""
    max_restarts: int = Field(3, ge=0)
    """After the loss of a process, start again from the newest checkpoint, at most so often; 0: never."""
    min_processes: int = Field(1, ge=1)
    """When processes are lost twice with no checkpoint in between, go on with one fewer, down to so many."""


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
        """Run the plan to its end, over restarts, and return the exit code: 0, or the one of the first that failed.

        Rank 0 writes to the terminal, the others to logs/rank-N.log. Raises Interrupted after SIGINT or SIGTERM,
        once every process has ended.
        """
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        os.environ.update(plan.environment)
        others = set(psutil.Process().children())
        try:
            return self._over_restarts(replace(plan, argv=(*plan.argv, "--began", f"{time.time():.3f}")), logs)
        except SignalException as error:
            for left in set(psutil.Process().children()) - others:  # after a second signal, which ends at once
                with suppress(psutil.Error):
                    left.kill()
            raise Interrupted(f"ended by {signal.Signals(error.sigval).name}") from None

    def _over_restarts(self, plan: Plan, logs: Path) -> int:
        """Start again as long as it makes sense; returns the exit code."""
        restarts, in_vain, before = 0, 0, saved(logs)
        while (failure := self._attempt(plan, logs)) is not None:
            got, before = bool(set(saved(logs).items()) - set(before.items())), saved(logs)
            in_vain = 0 if got else in_vain + 1
            sys.stderr.write(f"{failure.text}\n" if failure.text else "")
            if failure.is_final:
                return failure.exit_code
            if obstacle := self._obstacle(failure, restarts, got_further=got):
                sys.stderr.write(_farewell(plan, logs, obstacle))
                return failure.exit_code
            restarts += 1
            if before:  # a start from scratch, or from another place, was asked for once
                plan = replace(plan, argv=_resuming(plan.argv))
            if in_vain > 1 and plan.processes > self.config.min_processes:
                plan = replace(plan, processes=plan.processes - 1)
            sys.stderr.write(
                f"Starting again on {_processes(plan.processes)} from {newest(logs) or 'the beginning'} "
                f"(restart {restarts} of {self.config.max_restarts}).\n"
            )
        return 0

    def _obstacle(self, failure: Failure, restarts: int, *, got_further: bool) -> str | None:
        """Why the run is not started again, if so."""
        if not failure.was_killed and not got_further:
            return "It is not started again: with no checkpoint since, the same would happen at the same place."
        if restarts < self.config.max_restarts:
            return None
        if not self.config.max_restarts:
            return "It is not started again (launch.max_restarts=0)."
        return f"It is not started again after {restarts} restarts (launch.max_restarts)."

    def _attempt(self, plan: Plan, logs: Path) -> Failure | None:
        """Start all processes and wait for their end -> the first that failed, if any. Raises SignalException."""
        logs.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("rank-*.log"):
            if log.name != "rank-0.log":  # which is continued
                log.replace(log.with_suffix(".log.before"))
        for last_word in [*logs.glob(".error-*.json"), *logs.glob(VERDICT)]:
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
            max_restarts=0,  # the agent would start again after any error, and never on fewer processes
            logs_specs=RankLogs(logs),
            signals_to_handle=",".join(signals),
            shutdown_timeout=self.config.grace_seconds,
        )
        kills_before = oom_kills()
        try:
            elastic_launch(config, plan.argv[0])(*plan.argv[1:])
        except ChildFailedError as error:
            return failure_of(error, logs, kills_before)
        return None


def saved(logs: Path) -> dict[str, float]:
    """The checkpoints of the run with these logs -> when they were made. One that is written now has a longer name."""
    found = {}
    for file in (logs.parent / "checkpoints").glob("step-*/manifest.json"):
        with suppress(OSError):
            if file.parent.name[len("step-") :].isdecimal():
                found[file.parent.name] = file.stat().st_mtime
    return found


def newest(logs: Path) -> str | None:
    """The name of the newest of them."""
    return max(saved(logs), default=None)


def _resuming(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command with `--resume auto` in place of what was asked for."""
    return tuple("auto" if before == "--resume" else word for before, word in zip(("", *argv), argv, strict=False))


def _farewell(plan: Plan, logs: Path, why: str) -> str:
    lines = [*(["The other processes were ended too."] if plan.processes > 1 else []), why]
    if newest(logs):
        lines.append(f"Go on from {newest(logs)} with: lockstep train {logs.parent / 'recipe.yaml'}")
    return "\n".join(lines) + "\n"


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


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
        errors = {local: str(self.folder / f".error-{rank}.json") for local, rank in ranks.items()}
        for local, file in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = file
        return LogsDest(paths, paths, {}, {}, errors)  # nothing to be followed: a thread that does so outlives a signal


def build(config: Config, *, threads: int, shards: int) -> Local:
    """The launcher; `threads` is how many each process may use, `shards` how many processes can find work."""
    return Local(config, threads=threads, shards=shards)
