"""The workers of this machine with launch.recovery=live: one that is lost is started again while the others go on."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lockstep.base import ctrl_c, storage
from lockstep.base.lifetime import Started
from lockstep.launch.elastic.agent import WorkerGroupStart
from lockstep.launch.elastic.failure import Failure, death, failure_of, oom_kills
from lockstep.launch.elastic.fork_server import WorkerStart
from lockstep.launch.elastic.live_slots import Slot, in_whole_replicas, requested_size, resize
from lockstep.launch.elastic.stopped_workers import is_stopped
from lockstep.launch.launch_config import LaunchSection
from lockstep.protocol import run_secret
from lockstep.protocol.environment import CPP_LOG_LEVEL, RUN_ID
from lockstep.protocol.live_messages import (
    JOINS,
    NAME,
    PORT,
    SHIELDED,
    SHIELDED_STOP,
    TERMINAL,
    Exit,
    Formation,
    LiveMessages,
    MachineState,
    WorkerReport,
    worker_name,
)
from lockstep.protocol.rendezvous import LOOPBACK, Endpoint, serve_store

POLL_SECONDS = 0.02
"""Pause between two checks of workers that have to exit."""
STOPPED_SECONDS = 0.2
"""Pause between two checks for stopped workers."""
OWN_STOP_SECONDS = 2.0
"""Longest pause between these checks, after which this process counts as stopped itself."""
RESIZE_SECONDS = 0.5
"""Pause between two checks for a requested number of processes."""


@dataclass(frozen=True, kw_only=True)
class MachinePlace:
    """Place of a machine's workers in a round."""

    machine: int = 0
    round: int
    first_rank: int = 0
    """Rank of the first worker here among those that start together."""
    world_size: int
    host: str = LOOPBACK
    """Host of the store, at `port`, through which the workers that start together connect."""
    port: int
    joins: bool = False
    """Whether the workers join a run in progress."""
    is_alone: bool = True
    """Whether the run has no other machine."""
    is_replacement: bool = False
    """Whether the machine was started in the place of a lost one, by a job of its own."""


@dataclass(kw_only=True)
class LiveWorker:
    """A process that is, or will be, a member of formations."""

    name: str
    slot: int
    """Index of its slot; a process that is started again has the slot of the lost one."""
    process: Started
    stopped_since: float | None = None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()


class LiveWorkers:
    def __init__(self, start: WorkerGroupStart, place: MachinePlace, section: LaunchSection) -> None:
        self.start, self.place, self.section = start, place, section
        processes = start.processes + section.spare_processes
        self.store = serve_store(Endpoint(host=LOOPBACK, port=0)).open_to(run_secret.create(start.logs.parent))
        self.notes = LiveMessages(self.store)
        self.slots = [Slot(is_spare=number >= start.processes) for number in range(processes)]
        self.running: dict[str, LiveWorker] = {}
        """Running workers by name; the oldest first."""
        self.exits: dict[str, Exit] = {}
        """Exits of members of the formation, by name."""
        self.reports: dict[str, WorkerReport] = {}
        self.num_reports = 0
        """Number of reports that have been read."""
        self.formation = Formation()
        """Newest formation that this machine has received."""
        self.broken_since: float | None = None
        """Time at which the formation broke; None once there is a new one."""
        self.looked_at_stopped = self.looked_at_size = 0.0
        self.deaths: dict[int, ProcessFailure] = {}
        """Failures of killed members by slot: they count if no member is left."""
        self.failures: dict[int, ProcessFailure] = {}
        """Failures that end the round, by slot."""
        self.has_finished = False
        """Whether a worker has ended regularly, or all have to end: none is started any more."""
        self.kills_before = oom_kills()
        self.terminal = os.dup(1), os.dup(2)
        """Descriptors of the terminal, for the worker that becomes rank 0."""

    def state(self) -> MachineState:
        """Return the machine's state for the coordinator."""
        return MachineState(
            round=self.place.round,
            workers={name: self.reports.get(name) for name in self.running},
            exits=dict(self.exits),
            leaving=tuple(worker.name for worker in self.running.values() if self.slots[worker.slot].is_closed),
            spares=tuple(worker.name for worker in self._spares()),
            is_training=self.formation.is_training or self.notes.is_training(),
            formation=self.formation,
        )

    def _spares(self) -> list[LiveWorker]:
        return [worker for worker in self.running.values() if self.slots[worker.slot].is_spare]

    @property
    def is_calm(self) -> bool:
        """Whether all expected workers train, and only an exit or `lockstep resize` can change that."""
        formation = self.formation
        is_whole = formation.is_training and not (formation.is_broken or formation.is_wanted)
        is_known = all(name in formation.members or self._only_waits(name) for name in self.running)
        return is_whole and is_known and all(slot.due is None for slot in self.slots)

    def _only_waits(self, name: str) -> bool:
        """Return whether a worker that is no member has reported all that it can for now."""
        report = self.reports.get(name)
        return report is not None and (report.part is not None or name not in self.formation.assigned)

    def start_all(self) -> None:
        """Start all workers except spares, which start once the others train, as they would compete with them."""
        for number in range(self.start.processes):
            self._start(number, joins=self.place.joins)

    def look(self) -> None:
        """Handle exits, stopped workers, reports and requests to resize, and start the workers that are due."""
        self._kill_stopped()
        self._kill_late()
        for worker in [worker for worker in self.running.values() if worker.code is not None]:
            del self.running[worker.name]
            self._handle_exit(worker)
        self._read_reports()
        if not self.failures:
            self._resize()
            self._start_due()

    def follow(self, formation: Formation) -> None:
        """Publish a newer formation to the workers."""
        if formation.version <= self.formation.version:
            return
        before, self.formation = self.formation, formation
        is_new = formation.generation > before.generation
        if is_new or not formation.is_broken:
            self.broken_since = None
        elif self.broken_since is None:
            self.broken_since = time.monotonic()
        if formation.is_training and not before.is_training:
            self._start_spares()
        self.notes.publish(formation)
        if is_new:
            self._note_members()

    def _note_members(self) -> None:
        members = self.formation.members
        self.exits = {name: exit for name, exit in self.exits.items() if name in members}
        self.deaths.clear()
        self._kill_waiting(self.state().leaving)

    def _kill_waiting(self, names: Iterable[str]) -> None:
        """Kill those of these workers that are no members: they hold nothing that the others lack."""
        for name in [name for name in names if name not in self.formation.members]:
            self.running.pop(name).process.kill()

    def _handle_exit(self, worker: LiveWorker) -> None:
        code, formation = worker.code, self.formation
        assert code is not None
        is_member = worker.name in formation.members
        self.exits[worker.name] = Exit(code=code, text=self._exit_text(worker, code))
        if code == 0:
            self.has_finished = True
            return
        is_starting = not formation.is_training and (is_member or not formation.generation)
        if is_starting or (is_member and code > 0):
            self.failures[worker.slot] = self._process_failure(worker, code)
            return
        if is_member:
            self.deaths[worker.slot] = self._process_failure(worker, code)
        slot = self.slots[worker.slot]
        slot.schedule(has_failed=code > 0)
        self._replace(slot)

    def _start_spares(self) -> None:
        for slot in self.slots:
            if slot.is_spare:
                slot.schedule()

    def _replace(self, lost: Slot) -> None:
        """Have a spare take the place of a lost worker, whose restarted process becomes the next spare."""
        spares = sorted(self._spares(), key=lambda worker: worker.name not in self.reports)
        if spares and not (lost.is_spare or lost.is_closed):
            self.slots[spares[0].slot].is_spare, lost.is_spare = False, True

    def _exit_text(self, worker: LiveWorker, code: int) -> str:
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
        """Start or end processes where `lockstep resize` has asked for another number; the lowest ranks stay."""
        now = time.monotonic()
        if now - self.looked_at_size < RESIZE_SECONDS:
            return
        self.looked_at_size = now
        if (wanted := requested_size(self.start.logs.parent)) is not None:
            members, size = self.formation.members, self.formation.replica_size
            number = in_whole_replicas(wanted, size, max(1, len(self.formation.machines)))
            resize(self.slots, number, [self.running[name].slot for name in members if name in self.running])
            self._kill_waiting(self.state().leaving)

    # ---- starting

    def _start_due(self) -> None:
        occupied = {worker.slot for worker in self.running.values()}
        for number, slot in enumerate(self.slots):
            if not slot.is_due() or self.has_finished:
                continue
            if number in occupied:  # closed and opened again before its process had left
                slot.due = None
                continue
            try:
                self._start(number, joins=True)
            except OSError:  # memory may be short; the others go on
                slot.schedule(has_failed=True)

    def _start(self, slot: int, *, joins: bool) -> None:
        place = self.place
        name = worker_name(place.machine, slot, self.slots[slot].begin())
        is_main = not (slot or place.first_rank or place.joins)
        log = self.start.logs / (f"rank-{self._label(slot)}.log" if not is_main else "rank-0.again.log")
        own = {NAME: name, **({JOINS: "1"} if joins else {}), **({SHIELDED: "1"} if place.is_replacement else {})}
        variables = {**os.environ, **self._variables(slot, joins=joins), **own}
        with ctrl_c.blocked():
            process = self._process(variables, None if is_main and not joins else log)
        if self.start.fork_server is not None and joins:
            self.start.fork_server.began = None
        self.running[name] = LiveWorker(name=name, slot=slot, process=process)

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
        """Return the variables that torchrun sets for every process; one that joins starts as a world of its own."""
        error, place = self._error_file(slot), self.place
        with suppress(OSError):
            error.unlink()
        ranks = ("0", "1", "0", "1")
        if not joins:
            ranks = str(place.first_rank + slot), str(place.world_size), str(slot), str(self.start.processes)
        return {
            **dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ranks, strict=True)),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_RUN_ID": RUN_ID,
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
        pause, limit = now - self.looked_at_stopped, self.section.worker_timeout_seconds
        if pause < STOPPED_SECONDS:
            return
        self.looked_at_stopped = now
        for worker in self.running.values():
            if pause > OWN_STOP_SECONDS or not is_stopped(worker.process.pid):
                worker.stopped_since = None
            elif worker.stopped_since is None:
                worker.stopped_since = now
            elif now - worker.stopped_since > limit:
                sys.stderr.write(f"process {worker.process.pid} has been stopped for {limit:g} s: it is killed\n")
                worker.process.kill()

    def _kill_late(self) -> None:
        """Kill members that do not come for a new formation: they hang somewhere, and all others wait for them."""
        seconds = self.section.collective_timeout_seconds
        if self.broken_since is None or time.monotonic() - self.broken_since < seconds:
            return
        self.broken_since = None
        for rank, name in enumerate(self.formation.members):
            report = self.reports.get(name)
            if name in self.running and not (report and report.generation >= self.formation.generation):
                sys.stderr.write(f"rank {rank} has kept the others waiting for {seconds:.0f} s: it is killed\n")
                self.running[name].process.kill()

    def begin_end(self, number: signal.Signals) -> None:
        """Have the workers save and exit; kill those that wait to join."""
        self.has_finished = True
        if self.formation.generation:
            self._kill_waiting(self.running)
        if self.place.is_replacement and number != signal.SIGKILL:
            number = SHIELDED_STOP
        for worker in self.running.values():
            if worker.code is None:
                with suppress(OSError):
                    os.kill(worker.process.pid, number)

    def wait_for_exits(self, seconds: float) -> None:
        """Wait for the exits of members; kill others, such as spares."""
        if self.formation.generation:
            self._kill_waiting(self.running)
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            for worker in [worker for worker in self.running.values() if worker.code is not None]:
                del self.running[worker.name]
                if worker.code:
                    self.failures.setdefault(worker.slot, self._process_failure(worker, worker.code))

    def close(self) -> None:
        """Kill the workers that still run."""
        for worker in self.running.values():
            worker.process.kill()
        for worker in self.running.values():
            worker.process.wait()
        self.running.clear()
        self.store.close()
        for descriptor in self.terminal:
            os.close(descriptor)

    def _process_failure(self, worker: LiveWorker, code: int) -> ProcessFailure:
        return ProcessFailure(worker.slot, worker.process.pid, code, str(self._error_file(worker.slot)))

    def failure(self) -> Failure | None:
        if not self.failures:
            return None
        ranks = {self.place.first_rank + slot: failure for slot, failure in self.failures.items()}
        return failure_of(ChildFailedError("lockstep", ranks), self.start.logs, self.kills_before)
