"""The worker processes of one machine in a round: how they are started, watched, signalled and ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.base import ctrl_c, storage
from lockstep.base.errors import LaunchError
from lockstep.base.lifetime import Started
from lockstep.core.host.memory_meter import oom_kills
from lockstep.launch.elastic.failure import Failure, failure_of
from lockstep.launch.elastic.fork_server import ForkServer, ServerKilled, WorkerStart
from lockstep.launch.elastic.output_pipe import OutputPipe
from lockstep.protocol.environment import CPP_LOG_LEVEL, RUN_ID
from lockstep.protocol.rendezvous import LOOPBACK

POLL_SECONDS, EXIT_POLL_SECONDS = 0.02, 0.003
"""Pauses between two checks of the workers; of one that has exited, whose exit code the fork server has yet to send."""
KILL_SECONDS = 30.0
"""Longest wait for the end of a killed process, which may hang in the system, such as in a lost network file system."""
STOPPED_SECONDS = 0.2
"""Pause between two checks for stopped workers."""
OWN_STOP_SECONDS = 2.0
"""Longest pause between these checks, after which this process counts as stopped itself."""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, kw_only=True)
class WorkerGroupStart:
    argv: tuple[str, ...]
    processes: int
    logs: Path
    grace_seconds: int
    fork_server: ForkServer | None = None
    """Server that forks the workers; None: each is started as a new process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers, beside those of this process and those that torchrun sets."""
    own_sessions: bool = True
    """Whether signals of the terminal are left to this process; else they reach the workers, too."""
    pipes: Mapping[int, OutputPipe] = field(default_factory=dict)
    """Pipes for rank 0's stdout (1) and stderr (2), where these are not this process's own."""


@dataclass(frozen=True, kw_only=True)
class MachinePlace:
    """Place of a machine's workers in a round."""

    machine: int = 0
    round: int = 0
    first_rank: int = 0
    """Rank of the first worker here among those that start together."""
    world_size: int
    host: str = LOOPBACK
    """Host of the store, at `port`, through which the workers that start together connect."""
    port: int
    joins: bool = False
    """Whether the workers join a run in progress."""
    number: int = 0
    """Number of this machine among `machines` of the round."""
    machines: int = 1
    is_alone: bool = True
    """Whether the run can have no other machine."""
    is_replacement: bool = False
    """Whether the machine was started in the place of a lost one, by a job of its own."""


@dataclass(kw_only=True)
class WorkerProcess:
    name: str
    slot: int
    """Its local rank; a process that is started again has the slot of the lost one."""
    process: Started
    stopped_since: float | None = None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()


class WorkerProcesses:
    inherited: Sequence[int] = ()
    """File descriptors that workers have besides their standard streams."""

    def __init__(self, start: WorkerGroupStart, place: MachinePlace, stopped_limit_seconds: float) -> None:
        """`stopped_limit_seconds`: how long a signal or a debugger may stop a worker before it is killed."""
        self.start, self.place, self.stopped_limit_seconds = start, place, stopped_limit_seconds
        self.running: dict[str, WorkerProcess] = {}
        """Running workers by name; the oldest first."""
        self.failures: dict[int, ProcessFailure] = {}
        """Failures that end the round, by slot."""
        self.num_finished = 0
        """Number of workers that have exited with code 0."""
        self.kills_before = oom_kills()
        self.looked_at_stopped = 0.0

    def start_all(self) -> None:
        """Start all workers. Raises LaunchError, or ServerKilled, if one cannot be started."""
        start = self.start
        try:
            for slot in range(start.processes):
                self.start_one(slot, joins=self.place.joins)
        except ServerKilled:
            raise
        except OSError as error:
            raise LaunchError(f"cannot start {start.processes} processes: {error.strerror}") from None
        finally:
            for pipe in start.pipes.values():
                os.close(pipe.writer)  # else the pipe would never reach its end
            if start.fork_server is not None:
                start.fork_server.began = None

    def start_one(self, slot: int, *, joins: bool) -> None:
        """Start the worker of a slot. Raises OSError."""
        self.begin(slot, str(slot), {}, joins=joins)

    def begin(self, slot: int, name: str, more: Mapping[str, str], *, joins: bool) -> None:
        """Start a worker, with `more` variables; one that joins starts as a world of its own. Raises OSError."""
        place, start = self.place, self.start
        is_main = not (slot or place.first_rank or place.joins)
        log = start.logs / (f"rank-{self._label(slot)}.log" if not is_main else "rank-0.again.log")
        variables = {**os.environ, **start.environment, **self._variables(slot, joins=joins), **more}
        with ctrl_c.blocked():
            process = self._process(variables, None if is_main and not joins else log)
        self.running[name] = WorkerProcess(name=name, slot=slot, process=process)

    def _label(self, slot: int) -> str:
        """Return a slot's name in files: for those that start together, the rank."""
        place = self.place
        is_later = place.joins or slot >= self.start.processes
        return f"{place.machine}-{slot}" if is_later and not place.is_alone else str(place.first_rank + slot)

    def _process(self, variables: Mapping[str, str], log: Path | None) -> Started:
        argv = self.start.argv
        if log is not None:
            storage.append(log).close()
        server = self.start.fork_server
        if server is not None and server.is_ready():
            module, *words = argv[argv.index("-m") + 1 :]
            return server.fork(
                WorkerStart(
                    module=module,
                    arguments=tuple(words),
                    environment=variables,
                    log=str(log or ""),
                    began=server.began or time.time(),
                )
            )
        writers = {} if log else {descriptor: pipe.writer for descriptor, pipe in self.start.pipes.items()}
        with open(log or os.devnull, "ab") as file:
            return subprocess.Popen(
                argv,
                env=dict(variables),
                stdout=file if log else writers.get(1),
                stderr=file if log else writers.get(2),
                pass_fds=self.inherited,
                start_new_session=self.start.own_sessions,
            )

    def _variables(self, slot: int, *, joins: bool) -> dict[str, str]:
        """Return the variables that torchrun sets for every process."""
        error, place = self._error_file(slot), self.place
        with suppress(OSError):
            error.unlink()
        ranks = ("0", "1", "0", "1")
        if not joins:
            ranks = str(place.first_rank + slot), str(place.world_size), str(slot), str(self.start.processes)
        return {
            **dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ranks, strict=True)),
            "GROUP_RANK": str(place.number),
            "GROUP_WORLD_SIZE": str(place.machines),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_RUN_ID": RUN_ID,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher's, which outlives rank 0
            "TORCHELASTIC_ERROR_FILE": str(error),
            CPP_LOG_LEVEL: os.environ.get(CPP_LOG_LEVEL, "ERROR"),
        }

    def _error_file(self, slot: int) -> Path:
        return self.start.logs / f".error-{self._label(slot)}.json"

    # ---- watching

    def look(self) -> None:
        """Handle exits and stopped workers."""
        self.kill_stopped()
        self._count_exits()

    def _count_exits(self) -> None:
        for worker in self.exited():
            if worker.code:
                self.failures.setdefault(worker.slot, self.failure_of_process(worker, worker.code))
            else:
                self.num_finished += 1

    def exited(self) -> list[WorkerProcess]:
        """Return the workers that have exited since the last call; none of them is running any more."""
        exited = [worker for worker in self.running.values() if worker.code is not None]
        for worker in exited:
            del self.running[worker.name]
        return exited

    def kill_stopped(self) -> None:
        """Kill workers that a signal or a debugger has stopped for too long: the others wait for them."""
        now = time.monotonic()
        pause, limit = now - self.looked_at_stopped, self.stopped_limit_seconds
        if pause < STOPPED_SECONDS:
            return
        self.looked_at_stopped = now
        for worker in self.running.values():
            if pause > OWN_STOP_SECONDS or not _is_stopped(worker.process.pid):
                worker.stopped_since = None
            elif worker.stopped_since is None:
                worker.stopped_since = now
            elif now - worker.stopped_since > limit:
                sys.stderr.write(f"process {worker.process.pid} has been stopped for {limit:g} s: it is killed\n")
                worker.process.kill()

    def pause(self, seconds: float) -> None:
        """Wait until a worker exits or has written to a pipe, at most for so long; copy what it has written."""
        pipes = {pipe.reader: pipe for pipe in self.start.pipes.values() if pipe.is_open}
        with ExitStack() as stack:
            exits: list[int] = []
            try:
                for worker in self.running.values():
                    exits.append(os.pidfd_open(worker.process.pid))
                    stack.callback(os.close, exits[-1])
            except ProcessLookupError:
                seconds = EXIT_POLL_SECONDS
            except (AttributeError, OSError):  # this system cannot wait for any process
                seconds = min(seconds, POLL_SECONDS)
            if not exits and not pipes:
                time.sleep(seconds)
                return
            ready = wait([*exits, *pipes], seconds)
        if not pipes.keys().isdisjoint(ready):
            for reader in pipes.keys() & set(ready):
                pipes[reader].copy_chunk()
        elif ready:
            time.sleep(EXIT_POLL_SECONDS)

    # ---- ending

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the workers that run."""
        for worker in self.running.values():
            if worker.code is None:
                with suppress(OSError):
                    os.kill(worker.process.pid, number)

    def wait_for_exits(self, seconds: float) -> None:
        """Wait until all workers have exited; those that fail meanwhile count, too."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.pause(POLL_SECONDS)
            self._count_exits()

    def close(self) -> None:
        """Kill the workers that still run."""
        for worker in self.running.values():
            with suppress(AttributeError, OSError):  # with what it has started; it has no group of its own on Windows
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.kill()
        for worker in self.running.values():
            try:
                worker.process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"process {worker.process.pid} was killed and does not end: the system holds it\n")
        self.running.clear()
        for pipe in self.start.pipes.values():
            pipe.close()

    def failure_of_process(self, worker: WorkerProcess, code: int) -> ProcessFailure:
        return ProcessFailure(worker.slot, worker.process.pid, code, str(self._error_file(worker.slot)))

    def failure(self) -> Failure | None:
        """Return the first failure among those that end the round."""
        if not self.failures:
            return None
        ranks = {self.place.first_rank + slot: failure for slot, failure in self.failures.items()}
        return failure_of(ranks, self.start.logs, self.kills_before)


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in STOPPED
    return False
