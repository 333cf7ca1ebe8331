"""The spawn launcher: processes of this machine, through torch.multiprocessing."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing.spawn import start_processes

from lockstep.base import ctrl_c, hash_seed, lifetime
from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import Interrupted, LaunchError
from lockstep.base.world import environment
from lockstep.launch.elastic.failure import Failure, failure_of, oom_kills
from lockstep.launch.elastic.fork_server import SIGNALS
from lockstep.launch.elastic.leader import FAILED_SECONDS, resume_hint, rotate_logs
from lockstep.launch.elastic.node import worker_plan
from lockstep.launch.elastic.stopped_workers import StoppedWorkers
from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.launchers._output_pipe import OutputPipe
from lockstep.launch.launchers._own_process import OwnProcess
from lockstep.launch.launchers._spawned_rank import RankStart, error_file, run
from lockstep.protocol import run_secret
from lockstep.protocol.environment import RUN_ID
from lockstep.protocol.rendezvous import LOOPBACK, Endpoint, serve_store

POLL_SECONDS = 0.25


class Spawn(OwnProcess):
    def __init__(self, config: LaunchSection, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards

    def plan(self, request: Request) -> Plan:
        """Plan the worker command and the number of workers; raises LaunchError for more than GPUs."""
        return worker_plan(self.config, request, threads=self.threads, shards=self.shards, endpoint=None)

    def run(self, plan: Plan, logs: Path) -> int:
        """Run the plan to its end -> the exit code: 0, or that of the first process that failed.

        Rank 0 writes to the terminal, the others to logs/rank-N.log. Raises Interrupted after SIGINT or SIGTERM,
        once every process has ended.
        """
        failure = self.failure(plan, logs)
        if failure is None:
            return 0
        if failure.text:
            sys.stderr.write(f"{failure.text}\n{resume_hint(logs)}")
        return failure.exit_code

    def failure(self, plan: Plan, logs: Path, pipes: Mapping[int, OutputPipe] | None = None) -> Failure | None:
        """Run the plan to its end, without output of its own -> the first failure, if any.

        `pipes` redirect file descriptors of rank 0 (1: stdout, 2: stderr). The environment is restored afterwards.
        Raises Interrupted after a signal, once every process has ended; LaunchError if a process cannot be started.
        """
        logs.mkdir(parents=True, exist_ok=True)
        rotate_logs(logs)
        kills_before = oom_kills()
        workers = SpawnedWorkers(pipes or {}, self.config)
        with workers.forwarding_signals():
            store = serve_store(Endpoint(host=LOOPBACK, port=0)).open_to(run_secret.create(logs))
            try:
                workers.start(plan, logs, port=store.port)
                workers.wait()
            finally:
                store.close()
        return workers.failure(logs, kills_before)


class SpawnedWorkers:
    """The workers of one run, started by torch.multiprocessing and supervised here.

    ProcessContext.join() cannot do that: after a failure it blocks, so that nobody reads rank 0's pipes or obeys a
    second signal, and it does not report which workers it had to kill, whose SIGKILL would pass for the cause.
    """

    def __init__(self, pipes: Mapping[int, OutputPipe], section: LaunchSection) -> None:
        self.pipes, self.grace_seconds = pipes, section.grace_seconds
        self.stopped = StoppedWorkers(section.failure_timeout_seconds)
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.received: signal.Signals | None = None
        """First signal that was received."""
        self.deadline = float("inf")
        """Time at which workers that still run are killed (time.monotonic)."""
        self.killed: list[multiprocessing.process.BaseProcess] = []
        self._received_at = 0.0

    def start(self, plan: Plan, logs: Path, *, port: int) -> None:
        """Start all workers, or none. Raises LaunchError."""
        if self.received is not None:
            return
        start = RankStart(
            argv=(*plan.module, "--began", f"{lifetime.launch_time():.3f}"),
            logs=logs,
            parent=os.getpid(),
            pipes=self.pipes,
        )
        variables = {**plan.environment, **_variables(plan.processes, logs, port)}  # OpenMP reads its own at start-up
        before = set(multiprocessing.active_children())
        try:
            with environment(variables), script_unread(), ctrl_c.blocked():
                context = start_processes(run, (start,), nprocs=plan.processes, join=False)
        except OSError as error:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
                process.join()
            raise LaunchError(f"cannot start {plan.processes} processes: {error.strerror}") from None
        finally:
            for pipe in self.pipes.values():
                pipe.close_writer()
        self.processes = list(context.processes)
        if self.received is not None:
            self._send(self.received)

    def wait(self) -> None:
        """Copy rank 0's output until all workers have exited, or been killed at the deadline."""
        try:
            while running := [process for process in self.processes if process.exitcode is None]:
                if any(process.exitcode for process in self.processes):
                    self.deadline = min(self.deadline, time.monotonic() + FAILED_SECONDS)
                if time.monotonic() > self.deadline:
                    self._kill()
                if len(self.processes) > 1:
                    self.stopped.kill(process.pid for process in running if process.pid)
                self._copy_output([process.sentinel for process in running], POLL_SECONDS)
            while self._copy_output([], 0.0):
                pass
        finally:
            self._kill()
            for pipe in self.pipes.values():
                pipe.close()

    def _copy_output(self, sentinels: list[int], seconds: float) -> bool:
        """Wait for the exit of a worker or output of rank 0, and copy it -> whether there was output."""
        by_reader = {pipe.reader: pipe for pipe in self.pipes.values() if pipe.is_open}
        if not sentinels and not by_reader:
            return False
        ready = [by_reader[each] for each in wait([*sentinels, *by_reader], seconds) if each in by_reader]
        return any([pipe.copy_chunk() for pipe in ready])

    def _kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()
                self.killed.append(process)

    def failure(self, logs: Path, kills_before: int) -> Failure | None:
        """Return the first failure, once all workers have exited. Raises Interrupted."""
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        if self.received is not None and (any(codes.values()) or not codes):
            raise Interrupted(f"ended by {self.received.name}")
        failures = {
            rank: ProcessFailure(rank, self.processes[rank].pid or 0, code, str(error_file(logs, rank)))
            for rank, code in codes.items()
            if code and self.processes[rank] not in self.killed
        }
        return failure_of(ChildFailedError("lockstep", failures), logs, kills_before) if failures else None

    # ---- signals

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Forward signals to the workers, if this is the main thread: no other thread can handle them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {name: signal.signal(getattr(signal, name), self._forward) for name in SIGNALS}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)

    def _forward(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            self.deadline = now + self.grace_seconds
            self._send(self.received)
        elif now - self._received_at > ctrl_c.ECHO_SECONDS:
            self.deadline = now

    def _send(self, number: signal.Signals) -> None:
        """Signal all workers: SIGINT, for which they wait less long, as such; any other as SIGTERM."""
        for process in self.processes:
            if process.exitcode is None and process.pid:
                with suppress(OSError):
                    os.kill(process.pid, number if number == signal.SIGINT else signal.SIGTERM)


def _variables(processes: int, logs: Path, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for every process of one machine."""
    return {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_RESTART_COUNT": "0",
        hash_seed.VARIABLE: hash_seed.chosen(),
        run_secret.VARIABLE: str(logs.absolute()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store of this process, which outlives rank 0
    }


@contextmanager
def script_unread() -> Iterator[None]:
    """Keep multiprocessing from importing `__main__` in processes that are started meanwhile: they do not need it, and
    it may lack an `if __name__` guard, take long, or be no file ("<stdin>")."""
    names = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    names |= {"__file__": None, "__spec__": None}
    try:
        yield
    finally:
        del names["__file__"], names["__spec__"]
        names |= before


def build(config: LaunchSection, *, threads: int, shards: int) -> Spawn:
    """Build the launcher; `threads` is the number of threads of each process, `shards` the most processes with work."""
    return Spawn(config, threads=threads, shards=shards)
