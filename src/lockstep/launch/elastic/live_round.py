"""One round of this machine's workers with launch.recovery=live: one that is lost is started again while the others
go on without it."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lockstep.base import ctrl_c, storage
from lockstep.base.lifetime import Started
from lockstep.launch.elastic.agent import RoundEnded, WorkerGroupStart
from lockstep.launch.elastic.environment import CPP_LOG_LEVEL
from lockstep.launch.elastic.failure import Failure, death, failure_of, oom_kills
from lockstep.launch.elastic.fork_server import WorkerStart
from lockstep.launch.elastic.live_notes import JOINS, NAME, TERMINAL, Formation, LiveNotes, Position
from lockstep.launch.elastic.stopped_workers import is_stopped

POLL_SECONDS, BUSY_POLL_SECONDS = 0.02, 0.003
"""Between two looks at the workers; while a formation is broken."""
STOPPED_SECONDS = 0.2
"""Between two looks at whether a worker is stopped."""
FAILED_SECONDS = 15.0
"""After a failure, how long the other workers may take to exit by themselves."""
FINISH_SECONDS = 2.0
"""How much later than rank 0 the others may exit."""
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
    """The number of processes that was asked for, if one was."""
    with suppress(OSError, ValueError):
        return max(1, int(storage.read(folder / RESIZE, 32)))
    return None


@dataclass(kw_only=True)
class LiveWorker:
    """A process that is, or will be, a member of formations."""

    name: str
    slot: int
    """Which of the run's processes it is; one that is started again has the slot of the lost one."""
    process: Started
    stopped_since: float | None = None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()


@dataclass(kw_only=True)
class Slot:
    """The starts of one of the run's processes."""

    starts: deque[float] = field(default_factory=deque)
    """Within the last hour."""
    total: int = 0
    due: float | None = None
    """When it is to be started again."""
    is_closed: bool = False
    """Whether the run was made smaller by it."""


class LiveRound:
    def __init__(self, start: WorkerGroupStart, *, host: str, port: int, heartbeat_seconds: float) -> None:
        self.start, self.host, self.port, self.heartbeat_seconds = start, host, port, heartbeat_seconds
        self.notes = LiveNotes(host, port)
        self.slots = [Slot() for _ in range(start.processes)]
        self.workers: dict[str, LiveWorker] = {}
        """Those that run, by name; the oldest first."""
        self.formation = Formation(generation=1, members=())
        self.num_reports = 0
        """That have been looked at."""
        self.looked_at_stopped = self.looked_at_size = 0.0
        self.losses: list[str] = []
        """Since the last formation."""
        self.failures: dict[int, ProcessFailure] = {}
        """By slot: those that end the round."""
        self.has_finished = False
        """Whether a worker has ended regularly."""
        self.kills_before = oom_kills()
        self.terminal = os.dup(1), os.dup(2)
        """For the worker that becomes rank 0."""

    # ---- the round

    def run(self, round_end: Callable[[], RoundEnded | None]) -> Failure | None:
        """Start the workers and see them through to the end -> the failure, if any.

        Raises RoundEnded, and SignalException when this process received a signal; both once all workers have exited.
        """
        (self.start.logs.parent / RESIZE).unlink(missing_ok=True)  # of an earlier start
        try:
            names = [self._start(slot, joins=False) for slot in range(len(self.slots))]
            self._publish(replace(self.formation, members=tuple(names)))
            while self.workers and not self.failures:
                time.sleep(BUSY_POLL_SECONDS if self.formation.is_broken else POLL_SECONDS)
                if (end := round_end()) is not None:
                    self._end(signal.SIGTERM if end.is_graceful else signal.SIGKILL)
                    raise end
                self._look()
            if self.failures:
                self._wait_for_exits(FAILED_SECONDS)
        except SignalException as error:
            self._end(error.sigval)
            raise
        finally:
            self._kill()
            for descriptor in self.terminal:
                os.close(descriptor)
        return self._failure()

    def _look(self) -> None:
        """Do what is due: for workers that have exited or are stopped, and for those that want a new formation."""
        self._kill_stopped()
        for worker in [worker for worker in self.workers.values() if worker.code is not None]:
            del self.workers[worker.name]
            self._exited(worker)
        if self.failures or not self.workers:
            return
        self._resize()
        self._start_due()
        self._form()

    def _exited(self, worker: LiveWorker) -> None:
        code = worker.code
        assert code is not None
        is_member = worker.name in self.formation.members
        if code == 0:
            self.has_finished = True
            if worker.name == self.formation.members[0]:  # it has written the run's results
                self._wait_for_exits(FINISH_SECONDS)
                self._kill()
                self.failures.clear()
            return
        survivors = [name for name in self.formation.members if name in self.workers]
        if is_member and (code > 0 or not survivors or not self.notes.is_training()):
            self.failures[worker.slot] = self._process_failure(worker, code)
            return
        self._schedule(worker.slot, has_failed=code > 0)
        if is_member:
            rank = self.formation.members.index(worker.name)
            self.losses.append(f"rank {rank} (process {worker.process.pid}) {death(code, self.kills_before)}")
            self.kills_before = oom_kills()
            self._break()

    def _break(self) -> None:
        if not self.formation.is_broken:
            self._publish(replace(self.formation, is_broken=True))

    def _publish(self, formation: Formation) -> None:
        self.formation = replace(formation, version=self.formation.version + 1)
        self.notes.publish(self.formation)

    def _form(self) -> None:
        """Publish a new formation once every member that is left has come for it; ask them to come when another worker
        waits."""
        seen, self.num_reports = self.num_reports, self.notes.num_reports
        if not self.formation.is_broken and self.num_reports == seen:
            return
        generation = self.formation.generation
        reports = {name: self.notes.reported(name) for name in self.workers}
        waiting = {n: report.position for n, report in reports.items() if report and report.generation >= generation}
        leaving = {name for name, worker in self.workers.items() if self.slots[worker.slot].is_closed}
        members = self.formation.members
        joining = [name for name, report in reports.items() if report and name not in (*members, *leaving)]
        left = [name for name in self.formation.members if name in self.workers]
        if any(name in waiting for name in left):
            self._break()
        if left and all(name in waiting for name in left):
            stay = {name: waiting[name] for name in left if name not in leaving}
            positions = stay | dict.fromkeys(joining, Position())
            self._publish(
                Formation(
                    generation=generation + 1,
                    members=tuple(positions),
                    positions=tuple(positions.values()),
                    losses=tuple(self.losses),
                )
            )
            self.losses.clear()
            for name in leaving:  # they wait, and hold nothing that the others lack
                self.workers.pop(name).process.kill()
        elif (joining or leaving) and not (self.formation.is_wanted or self.formation.is_broken):
            self._publish(replace(self.formation, is_wanted=True))

    def _resize(self) -> None:
        """Start or end processes where `lockstep resize` has asked for another number; rank 0 stays."""
        now = time.monotonic()
        if now - self.looked_at_size < RESIZE_SECONDS:
            return
        self.looked_at_size = now
        wanted = requested_size(self.start.logs.parent)
        if wanted is None:
            return
        of_rank_0 = self.workers[self.formation.members[0]].slot if self.formation.members[0] in self.workers else -1
        order = sorted(range(len(self.slots)), key=lambda number: (number != of_rank_0, number))
        while len(order) < wanted:
            order.append(len(self.slots))
            self.slots.append(Slot(is_closed=True))
        for place, number in enumerate(order):
            slot, is_closed = self.slots[number], place >= wanted
            if slot.is_closed != is_closed:
                slot.is_closed, slot.due = is_closed, None if is_closed else now
                self.num_reports = -1  # so that a formation without it is asked for

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

    def _start(self, slot: int, *, joins: bool) -> str:
        """Start a process -> its name."""
        this = self.slots[slot]
        this.total += 1
        this.starts.append(time.monotonic())
        name = f"{slot}.{this.total}"
        log = self.start.logs / (f"rank-{slot}.log" if slot else "rank-0.again.log")
        own = {NAME: name, **({JOINS: "1"} if joins else {})}
        rank, size = (0, 1) if joins else (slot, len(self.slots))  # one that joins begins by itself
        variables = {**os.environ, **self._variables(slot, rank=rank, size=size), **own}
        with ctrl_c.blocked():
            process = self._process(variables, log if slot or joins else None)
        if self.start.fork_server is not None and joins:
            self.start.fork_server.began = None
        self.workers[name] = LiveWorker(name=name, slot=slot, process=process)
        return name

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

    def _variables(self, slot: int, *, rank: int, size: int) -> dict[str, str]:
        """What torchrun sets for every process of one machine."""
        error = self._error_file(slot)
        with suppress(OSError):
            error.unlink()
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "lockstep",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(error),
            CPP_LOG_LEVEL: os.environ.get(CPP_LOG_LEVEL, "ERROR"),
            TERMINAL: ",".join(map(str, self.terminal)),
        }

    def _error_file(self, slot: int) -> Path:
        return self.start.logs / f".error-{slot}.json"

    # ---- ending

    def _kill_stopped(self) -> None:
        """Kill workers that a signal or a debugger has stopped: the others wait for them."""
        now = time.monotonic()
        if now - self.looked_at_stopped < STOPPED_SECONDS:
            return
        self.looked_at_stopped = now
        for worker in self.workers.values():
            if not is_stopped(worker.process.pid):
                worker.stopped_since = None
            elif worker.stopped_since is None:
                worker.stopped_since = now
            elif now - worker.stopped_since > self.heartbeat_seconds:
                worker.process.kill()

    def _end(self, number: signal.Signals) -> None:
        """Have the workers save and exit, within the grace period."""
        for worker in self.workers.values():
            if worker.code is None:
                with suppress(OSError):
                    os.kill(worker.process.pid, number)
        self._wait_for_exits(self.start.grace_seconds)

    def _wait_for_exits(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.workers and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            for worker in [worker for worker in self.workers.values() if worker.code is not None]:
                del self.workers[worker.name]
                if worker.code:
                    self.failures.setdefault(worker.slot, self._process_failure(worker, worker.code))

    def _kill(self) -> None:
        for worker in self.workers.values():
            worker.process.kill()
        for worker in self.workers.values():
            worker.process.wait()
        self.workers.clear()

    def _process_failure(self, worker: LiveWorker, code: int) -> ProcessFailure:
        return ProcessFailure(worker.slot, worker.process.pid, code, str(self._error_file(worker.slot)))

    def _failure(self) -> Failure | None:
        if not self.failures:
            return None
        return failure_of(ChildFailedError("lockstep", self.failures), self.start.logs, self.kills_before)
