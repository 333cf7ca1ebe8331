"""The workers of this machine with launch.recovery=live: one that is lost is started again while the others go on."""

import os
import platform
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lockstep.base import ctrl_c, storage
from lockstep.base.lifetime import Started
from lockstep.launch.elastic.agent import WorkerGroupStart
from lockstep.launch.elastic.environment import CPP_LOG_LEVEL
from lockstep.launch.elastic.failure import Failure, death, failure_of, oom_kills
from lockstep.launch.elastic.fork_server import WorkerStart
from lockstep.launch.elastic.live_notes import (
    JOINS,
    NAME,
    PORT,
    TERMINAL,
    Exit,
    Formation,
    LiveNotes,
    MachineState,
    WorkerReport,
    worker_name,
)
from lockstep.launch.elastic.rendezvous import LOOPBACK, Endpoint, serve_store
from lockstep.launch.elastic.stopped_workers import is_stopped

POLL_SECONDS = 0.02
"""Between two looks at workers that are to exit."""
STOPPED_SECONDS = 0.2
"""Between two looks at whether a worker is stopped."""
BACK_OFF_SECONDS = 0.5
"""Before the second start of a worker within an hour; twice as long before each further one."""
MOST_BACK_OFF_SECONDS = 30.0
HOUR_SECONDS = 3600.0
MOST_STARTS = 100
"""Of a worker within an hour; after it the others go on without."""
FREE_STARTS = 20
"""Of a worker within an hour, before it has to wait."""
RESIZE_SECONDS = 0.5
"""Between two looks at whether another number of processes is asked for."""
RESIZE = "resize"
"""The file in a run's folder with the number that is asked for."""


def requested_size(folder: Path) -> int | None:
    """The number of processes per machine that was asked for, if one was."""
    with suppress(OSError, ValueError):
        return max(1, int(storage.read(folder / RESIZE, 32)))
    return None


@dataclass(frozen=True, kw_only=True)
class MachinePlace:
    """What is particular to a machine's workers in a round."""

    machine: int = 0
    """The machine's number."""
    round: int
    first_rank: int = 0
    """Of the workers that start together."""
    world_size: int
    host: str = LOOPBACK
    """Where the workers that start together meet, with the port."""
    port: int
    joins: bool = False
    """Whether the workers join a run in progress."""
    is_alone: bool = True
    """Whether the run has no other machine."""


@dataclass(kw_only=True)
class LiveWorker:
    """A process that is, or will be, a member of formations."""

    name: str
    slot: int
    """Which of the machine's processes it is; one that is started again has the slot of the lost one."""
    process: Started
    stopped_since: float | None = None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()


@dataclass(kw_only=True)
class Slot:
    """The starts of one of the machine's processes."""

    starts: deque[float] = field(default_factory=deque)
    """Within the last hour."""
    total: int = 0
    due: float | None = None
    """When it is to be started again."""
    is_closed: bool = False
    """Whether the run was made smaller by it."""


class LiveWorkers:
    def __init__(self, start: WorkerGroupStart, place: MachinePlace, *, heartbeat_seconds: float) -> None:
        self.start, self.place, self.heartbeat_seconds = start, place, heartbeat_seconds
        self.store = serve_store(Endpoint(host=LOOPBACK, port=0))
        self.notes = LiveNotes(self.store.port)
        self.slots = [Slot() for _ in range(start.processes)]
        self.running: dict[str, LiveWorker] = {}
        """By name; the oldest first."""
        self.exits: dict[str, Exit] = {}
        """Of members of the formation."""
        self.reports: dict[str, WorkerReport] = {}
        self.num_reports = 0
        """That have been looked at."""
        self.formation = Formation()
        """The newest that this machine has been told."""
        self.looked_at_stopped = self.looked_at_size = 0.0
        self.deaths: dict[int, ProcessFailure] = {}
        """By slot, of members that were killed: failures if none is left."""
        self.failures: dict[int, ProcessFailure] = {}
        """By slot: those that end the round."""
        self.has_finished = False
        """Whether a worker has ended regularly."""
        self.kills_before = oom_kills()
        self.terminal = os.dup(1), os.dup(2)
        """For the worker that becomes rank 0."""

    def state(self) -> MachineState:
        """For the coordinator."""
        leaving = tuple(name for name, worker in self.running.items() if self.slots[worker.slot].is_closed)
        return MachineState(
            round=self.place.round,
            workers={name: self.reports.get(name) for name in self.running},
            exits=dict(self.exits),
            leaving=leaving,
            is_training=self.formation.is_training or self.notes.is_training(),
            formation=self.formation,
        )

    def start_all(self) -> None:
        for slot in range(len(self.slots)):
            self._start(slot, joins=self.place.joins)

    def look(self) -> None:
        """Do what is due: for workers that have exited or are stopped, and for those that are to be started."""
        self._kill_stopped()
        for worker in [worker for worker in self.running.values() if worker.code is not None]:
            del self.running[worker.name]
            self._exited(worker)
        if not self.failures:
            self._resize()
            self._start_due()
            self._read_reports()

    def follow(self, formation: Formation) -> None:
        """Tell the workers of the newest formation."""
        if formation.version <= self.formation.version:
            return
        is_new = formation.generation > self.formation.generation
        self.formation = formation
        self.notes.publish(formation)
        if is_new:
            self.exits = {name: exit for name, exit in self.exits.items() if name in formation.members}
            self.deaths.clear()
            for name in [*self.state().leaving]:
                if name not in formation.members:  # it waits, and holds nothing that the others lack
                    self.running.pop(name).process.kill()

    def _exited(self, worker: LiveWorker) -> None:
        code, formation = worker.code, self.formation
        assert code is not None
        is_member = worker.name in formation.members
        self.exits[worker.name] = Exit(code=code, text=self._told(worker, code))
        if code == 0:
            self.has_finished = True
            return
        is_starting = not formation.is_training and (is_member or not formation.generation)
        if is_starting or (is_member and code > 0):
            self.failures[worker.slot] = self._process_failure(worker, code)
            return
        if is_member:
            self.deaths[worker.slot] = self._process_failure(worker, code)
        self._schedule(worker.slot, has_failed=code > 0)

    def _told(self, worker: LiveWorker, code: int) -> str:
        if worker.name not in self.formation.members or code >= 0:
            return ""
        rank, kills_before = self.formation.members.index(worker.name), self.kills_before
        self.kills_before = oom_kills()
        where = "" if self.place.is_alone else f" on {platform.node()}"
        return f"rank {rank} (process {worker.process.pid}{where}) {death(code, kills_before)}"

    def _read_reports(self) -> None:
        seen, self.num_reports = self.num_reports, self.notes.num_reports
        if self.num_reports != seen:
            found = {name: self.notes.reported(name) for name in self.running}
            self.reports = {name: report for name, report in found.items() if report}

    def _resize(self) -> None:
        """Start or end processes where `lockstep resize` has asked for another number; rank 0 stays."""
        now = time.monotonic()
        if now - self.looked_at_size < RESIZE_SECONDS:
            return
        self.looked_at_size = now
        wanted = requested_size(self.start.logs.parent)
        if wanted is None:
            return
        main = self.running.get(next(iter(self.formation.members), ""))
        order = sorted(range(len(self.slots)), key=lambda number: (not main or number != main.slot, number))
        while len(order) < wanted:
            order.append(len(self.slots))
            self.slots.append(Slot(is_closed=True))
        for place, number in enumerate(order):
            slot, is_closed = self.slots[number], place >= wanted
            if slot.is_closed != is_closed:
                slot.is_closed, slot.due = is_closed, None if is_closed else now

    # ---- starting

    def _schedule(self, slot: int, *, has_failed: bool) -> None:
        """Start a worker again: at once, or later if that has happened often or is of no use yet."""
        this, now = self.slots[slot], time.monotonic()
        while this.starts and now - this.starts[0] > HOUR_SECONDS:
            this.starts.popleft()
        often = len(this.starts) - FREE_STARTS
        if len(this.starts) < MOST_STARTS and not (self.has_finished or this.is_closed):
            wait = min(BACK_OFF_SECONDS * 2**often, MOST_BACK_OFF_SECONDS) if often >= 0 else 0.0
            this.due = now + (MOST_BACK_OFF_SECONDS if has_failed else wait)

    def _start_due(self) -> None:
        for number, slot in enumerate(self.slots):
            if slot.due is not None and time.monotonic() >= slot.due and not self.has_finished:
                slot.due = None
                with suppress(OSError):  # memory may be short; the others go on
                    self._start(number, joins=True)

    def _start(self, slot: int, *, joins: bool) -> None:
        this, place = self.slots[slot], self.place
        this.total += 1
        this.starts.append(time.monotonic())
        name = worker_name(place.machine, slot, this.total)
        is_main = not (slot or place.first_rank or place.joins)
        log = self.start.logs / (f"rank-{self._label(slot)}.log" if not is_main else "rank-0.again.log")
        own = {NAME: name, **({JOINS: "1"} if joins else {})}
        variables = {**os.environ, **self._variables(slot, joins=joins), **own}
        with ctrl_c.blocked():
            process = self._process(variables, None if is_main and not joins else log)
        if self.start.fork_server is not None and joins:
            self.start.fork_server.began = None
        self.running[name] = LiveWorker(name=name, slot=slot, process=process)

    def _label(self, slot: int) -> str:
        """For the names of files: the rank of those that start together."""
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
            outputs = {1: str(log), 2: str(log)} if log else {}
            return server.fork(
                WorkerStart(
                    module=module,
                    arguments=tuple(words),
                    environment=variables,
                    outputs=outputs,
                    began=server.began or time.time(),
                )
            )
        with open(log or os.devnull, "ab") as file:
            output = file if log else None
            return subprocess.Popen(
                argv, env=dict(variables), stdout=output, stderr=output, pass_fds=self.terminal, process_group=0
            )

    def _variables(self, slot: int, *, joins: bool) -> dict[str, str]:
        """What torchrun sets for every process; one that joins begins by itself."""
        error, place = self._error_file(slot), self.place
        with suppress(OSError):
            error.unlink()
        ranks = ("0", "1", "0", "1")
        if not joins:
            ranks = str(place.first_rank + slot), str(place.world_size), str(slot), str(len(self.slots))
        return {
            **dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ranks, strict=True)),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_RUN_ID": "lockstep",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(error),
            CPP_LOG_LEVEL: os.environ.get(CPP_LOG_LEVEL, "ERROR"),
            PORT: str(self.store.port),
            TERMINAL: ",".join(map(str, self.terminal)),
        }

    def _error_file(self, slot: int) -> Path:
        return self.start.logs / f".error-{self._label(slot)}.json"

    # ---- ending

    def _kill_stopped(self) -> None:
        """Kill workers that a signal or a debugger has stopped: the others wait for them."""
        now = time.monotonic()
        if now - self.looked_at_stopped < STOPPED_SECONDS:
            return
        self.looked_at_stopped = now
        for worker in self.running.values():
            if not is_stopped(worker.process.pid):
                worker.stopped_since = None
            elif worker.stopped_since is None:
                worker.stopped_since = now
            elif now - worker.stopped_since > self.heartbeat_seconds:
                worker.process.kill()

    def end(self, number: signal.Signals) -> None:
        """Have the workers save and exit, within the grace period."""
        for worker in self.running.values():
            if worker.code is None:
                with suppress(OSError):
                    os.kill(worker.process.pid, number)
        self.wait_for_exits(self.start.grace_seconds)

    def wait_for_exits(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            for worker in [worker for worker in self.running.values() if worker.code is not None]:
                del self.running[worker.name]
                if worker.code:
                    self.failures.setdefault(worker.slot, self._process_failure(worker, worker.code))

    def close(self) -> None:
        """Kill those that still run."""
        for worker in self.running.values():
            worker.process.kill()
        for worker in self.running.values():
            worker.process.wait()
        self.running.clear()
        for descriptor in self.terminal:
            os.close(descriptor)

    def _process_failure(self, worker: LiveWorker, code: int) -> ProcessFailure:
        return ProcessFailure(worker.slot, worker.process.pid, code, str(self._error_file(worker.slot)))

    def failure(self) -> Failure | None:
        """The first failure, if any."""
        if not self.failures:
            return None
        ranks = {self.place.first_rank + slot: failure for slot, failure in self.failures.items()}
        return failure_of(ChildFailedError("lockstep", ranks), self.start.logs, self.kills_before)
