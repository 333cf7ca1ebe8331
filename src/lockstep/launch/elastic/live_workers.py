"""The workers of this machine with launch.recovery=live: one that is lost is started again while the others go on."""

import os
import platform
import signal
import sys
import time
from collections.abc import Iterable

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.core.host.memory_meter import oom_kills
from lockstep.launch.elastic.failure import death
from lockstep.launch.elastic.live_slots import Slot, in_whole_replicas, requested_size, resize
from lockstep.launch.elastic.worker_processes import MachinePlace, WorkerGroupStart, WorkerProcess, WorkerProcesses
from lockstep.launch.launch_config import LaunchSection, LiveLaunchSection
from lockstep.protocol import run_secret
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

RESIZE_SECONDS = 0.5
"""Pause between two checks for a requested number of processes."""


class LiveWorkers(WorkerProcesses):
    def __init__(self, start: WorkerGroupStart, place: MachinePlace, section: LaunchSection) -> None:
        assert isinstance(section, LiveLaunchSection)
        super().__init__(start, place, section.heartbeat_seconds)
        self.section = section
        processes = start.processes + section.spares
        self.store = serve_store(Endpoint(host=LOOPBACK, port=0)).open_to(run_secret.create(start.logs.parent))
        self.notes = LiveMessages(self.store)
        self.slots = [Slot(is_spare=number >= start.processes) for number in range(processes)]
        self.exits: dict[str, Exit] = {}
        """Exits of members of the formation, by name."""
        self.reports: dict[str, WorkerReport] = {}
        self.num_reports = 0
        """Number of reports that have been read."""
        self.formation = Formation()
        """Newest formation that this machine has received."""
        self.broken_since: float | None = None
        """Time at which the formation broke; None once there is a new one."""
        self.looked_at_size = 0.0
        self.deaths: dict[int, ProcessFailure] = {}
        """Failures of killed members by slot: they count if no member is left."""
        self.has_finished = False
        """Whether a worker has ended regularly, or all have to end: none is started any more."""
        self.inherited = self.terminal = os.dup(1), os.dup(2)
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

    def _spares(self) -> list[WorkerProcess]:
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

    def look(self) -> None:
        """Handle exits, stopped workers, reports and requests to resize, and start the workers that are due."""
        self.kill_stopped()
        self._kill_late()
        for worker in self.exited():
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
            for slot in self.slots:
                if slot.is_spare:  # which would have competed with them before
                    slot.schedule()
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

    def _handle_exit(self, worker: WorkerProcess) -> None:
        code, formation = worker.code, self.formation
        assert code is not None
        is_member = worker.name in formation.members
        self.exits[worker.name] = Exit(code=code, text=self._exit_text(worker, code))
        if code == 0:
            self.has_finished = True
            return
        is_starting = not formation.is_training and (is_member or not formation.generation)
        if is_starting or (is_member and code > 0):
            self.failures[worker.slot] = self.failure_of_process(worker, code)
            return
        if is_member:
            self.deaths[worker.slot] = self.failure_of_process(worker, code)
        slot = self.slots[worker.slot]
        self._replace(slot)
        slot.is_closed = slot.is_closed or self.notes.has_left(worker.name)
        slot.schedule(has_failed=code > 0)

    def _replace(self, lost: Slot) -> None:
        """Have a spare take the place of a lost worker, whose restarted process becomes the next spare."""
        spares = sorted(self._spares(), key=lambda worker: worker.name not in self.reports)
        if spares and not (lost.is_spare or lost.is_closed):
            self.slots[spares[0].slot].is_spare, lost.is_spare = False, True

    def _exit_text(self, worker: WorkerProcess, code: int) -> str:
        if worker.name not in self.formation.members or code >= 0:
            return ""
        rank, kills_before = self.formation.members.index(worker.name), self.kills_before
        self.kills_before = oom_kills()
        where = "" if self.place.is_alone else f" on {platform.node()}"
        end = "has left the run" if self.notes.has_left(worker.name) else death(code, kills_before)
        return f"rank {rank} (process {worker.process.pid}{where}) {end}"

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
                self.start_one(number, joins=True)
            except OSError:  # memory may be short; the others go on
                slot.schedule(has_failed=True)

    def start_one(self, slot: int, *, joins: bool) -> None:
        place = self.place
        name = worker_name(place.machine, slot, self.slots[slot].begin())
        own = {
            NAME: name,
            PORT: str(self.store.port),
            TERMINAL: ",".join(map(str, self.terminal)),
            **({JOINS: "1"} if joins else {}),
            **({SHIELDED: "1"} if place.is_replacement else {}),
        }
        self.begin(slot, name, own, joins=joins)

    # ---- ending

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
        self.send(number)

    def wait_for_exits(self, seconds: float) -> None:
        """Wait for the exits of members; kill others, such as spares."""
        if self.formation.generation:
            self._kill_waiting(self.running)
        super().wait_for_exits(seconds)

    def close(self) -> None:
        super().close()
        self.store.close()
        for descriptor in self.terminal:
            os.close(descriptor)
