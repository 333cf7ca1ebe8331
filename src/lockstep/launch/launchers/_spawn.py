"""This machine's processes, through torch.multiprocessing."""

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

from lockstep.base import ctrl_c
from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import Interrupted, LaunchError
from lockstep.launch.elastic.attempt import SIGNALS
from lockstep.launch.elastic.failure import Failure, failure_of, oom_kills
from lockstep.launch.elastic.leader import FAILED_SECONDS, clear, newest
from lockstep.launch.elastic.node import plan_of
from lockstep.launch.elastic.rendezvous import LOOPBACK, Endpoint, served
from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.launchers._output_pipe import Outlet
from lockstep.launch.launchers._own_process import OwnProcess
from lockstep.launch.launchers._spawned_rank import RankStart, error_file, run

LOOK_SECONDS = 0.25

ECHO_SECONDS = 1.0
"""Signals this close together are one: a terminal sends Ctrl-C to every process, and so does this one."""


class Spawn(OwnProcess):
    def __init__(self, config: LaunchSection, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards

    def plan(self, request: Request) -> Plan:
        """The worker command and how many of it; raises LaunchError for more than there are GPUs."""
        return plan_of(self.config, request, threads=self.threads, shards=self.shards, endpoint=None)

    def run(self, plan: Plan, logs: Path) -> int:
        """Run the plan to its end and return the exit code: 0, or the one of the first that failed.

        Rank 0 writes to the terminal, the others to logs/rank-N.log. Raises Interrupted after SIGINT or SIGTERM,
        once every process has ended.
        """
        failure = self.failure(plan, logs)
        if failure is None:
            return 0
        if failure.text:
            sys.stderr.write(f"{failure.text}\n")
            if newest(logs):
                sys.stderr.write(f"Go on from {newest(logs)} with: lockstep train {logs.parent / 'recipe.yaml'}\n")
        return failure.exit_code

    def failure(self, plan: Plan, logs: Path, outlets: Mapping[int, Outlet] | None = None) -> Failure | None:
        """Run the plan to its end -> the first process that failed, if any; without a word.

        `outlets` takes what rank 0 writes to a file descriptor (1: its output, 2: its errors) where that should not
        be this process's own. The environment is afterwards as it was. Raises Interrupted after a signal, once every
        process has ended; LaunchError where a process cannot be started.
        """
        logs.mkdir(parents=True, exist_ok=True)
        clear(logs)
        kills_before = oom_kills()
        ranks = Ranks(outlets or {}, grace_seconds=self.config.grace_seconds)
        with ranks.passing_on_signals():
            store = served(Endpoint(host=LOOPBACK, port=0))  # here, and so on a port that nobody else can take
            ranks.start(plan, logs, port=store.port)
            ranks.wait()
        return ranks.judged(logs, kills_before)


class Ranks:
    """The processes of one run, from their start to the end of the last."""

    def __init__(self, outlets: Mapping[int, Outlet], *, grace_seconds: float) -> None:
        self.outlets, self.grace_seconds = outlets, grace_seconds
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.asked: signal.Signals | None = None
        """The first signal that has come."""
        self.end = float("inf")
        """When those that are left are killed (time.monotonic)."""
        self.killed: list[multiprocessing.process.BaseProcess] = []
        """Those that have not ended by themselves."""
        self._asked_at = 0.0

    # ---- start

    def start(self, plan: Plan, logs: Path, *, port: int) -> None:
        """Start all of them; where one cannot be started, none is left. Raises LaunchError."""
        if self.asked is not None:
            return
        start = RankStart(
            argv=(*plan.module, "--began", f"{time.time():.3f}"),
            logs=logs,
            parent=os.getpid(),
            outlets=self.outlets,
        )
        variables = {**plan.environment, **_variables(plan.processes, port)}  # OpenMP's are read at the very beginning
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
            for outlet in self.outlets.values():
                outlet.close_writer()
        self.processes = list(context.processes)
        if self.asked is not None:
            self._send(self.asked)

    # ---- to the end

    def wait(self) -> None:
        """Until all have ended, by themselves or after a while; meanwhile pass on what rank 0 says."""
        try:
            while running := [process for process in self.processes if process.exitcode is None]:
                if any(process.exitcode for process in self.processes):
                    self.end = min(self.end, time.monotonic() + FAILED_SECONDS)
                if time.monotonic() > self.end:
                    self._kill()
                self._listen([process.sentinel for process in running], LOOK_SECONDS)
            while self._listen([], 0.0):
                pass
        finally:
            self._kill()
            for outlet in self.outlets.values():
                outlet.close()

    def _listen(self, sentinels: list[int], seconds: float) -> bool:
        """Wait for the end of a process or a word of rank 0, and pass it on -> whether there was one."""
        open_ones = {outlet.reader: outlet for outlet in self.outlets.values() if outlet.is_open}
        if not sentinels and not open_ones:
            return False
        spoken = [open_ones[ready] for ready in wait([*sentinels, *open_ones], seconds) if ready in open_ones]
        return any([outlet.pass_on() for outlet in spoken])

    def _kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()
                self.killed.append(process)

    def judged(self, logs: Path, kills_before: int) -> Failure | None:
        """What befell them, once all have ended. Raises Interrupted."""
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        if self.asked is not None and (any(codes.values()) or not codes):
            raise Interrupted(f"ended by {self.asked.name}")
        failures = {
            rank: ProcessFailure(rank, self.processes[rank].pid or 0, code, str(error_file(logs, rank)))
            for rank, code in codes.items()
            if code and self.processes[rank] not in self.killed
        }
        return failure_of(ChildFailedError("lockstep", failures), logs, kills_before) if failures else None

    # ---- signals

    @contextmanager
    def passing_on_signals(self) -> Iterator[None]:
        """Meanwhile a signal is for the processes; only the main thread can see to that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {name: signal.signal(getattr(signal, name), self._arrived) for name in SIGNALS}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)

    def _arrived(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number), now
            self.end = now + self.grace_seconds
            self._send(self.asked)
        elif now - self._asked_at > ECHO_SECONDS:
            self.end = now

    def _send(self, number: signal.Signals) -> None:
        """Ask all of them to end. Ctrl-C is passed on as such, as it waits less long than the others."""
        for process in self.processes:
            if process.exitcode is None and process.pid:
                with suppress(OSError):
                    os.kill(process.pid, number if number == signal.SIGINT else signal.SIGTERM)


def _variables(processes: int, port: int) -> dict[str, str]:
    """What torchrun would set for every process of one machine."""
    return {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": "lockstep",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here: it outlives rank 0
    }


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for what is started meanwhile; afterwards those of this process are as they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def script_unread() -> Iterator[None]:
    """A process that is started meanwhile does not read this one's script, as multiprocessing would have it: it has no
    use for it, and the script may lack a guard, take long, or be no file ("<stdin>")."""
    names = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    names |= {"__file__": None, "__spec__": None}
    try:
        yield
    finally:
        del names["__file__"], names["__spec__"]
        names |= before


def build(config: LaunchSection, *, threads: int, shards: int) -> Spawn:
    """The launcher; `threads` is how many each process may use, `shards` how many processes can find work."""
    return Spawn(config, threads=threads, shards=shards)
