"""The process group with launch.recovery=live: abandoned when a member is lost, and opened again by the others."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lockstep.base.errors import LaunchError, PeerLost
from lockstep.base.world import World
from lockstep.core.distributed import flight_recorder
from lockstep.core.distributed.authenticated_group import CONNECT_SECONDS, authenticate
from lockstep.core.distributed.group_connections import abort_nccl, shut_down_connections
from lockstep.core.distributed.process_group import backend_of, is_lost_peer, meetings, world_group
from lockstep.core.host import activity
from lockstep.protocol.live_messages import (
    JOINS,
    NAME,
    Formation,
    LiveMessages,
    Position,
    WorkerReport,
    machine_of,
    secret_of_run,
    store_at,
)
from lockstep.protocol.rendezvous import Endpoint
from lockstep.protocol.store_client import StoreClient

MOST_ATTEMPTS = 10
STUCK_SECONDS = 5.0
"""Seconds between two checks whether a collective has noticed that its connections are closed."""
NOTICE_SECONDS = 2.0
"""Seconds within which the launcher notices the loss that has caused an error in a collective."""


class LiveGroup:
    """This worker's place in the formations of its run."""

    def __init__(self, name: str, *, joins: bool, timeout_seconds: float) -> None:
        """Use the open process group: of the first formation or, where it `joins` a running one, of itself alone."""
        self.name, self.joins, self.timeout_seconds = name, joins, timeout_seconds
        self.backend = backend_of(World.from_environment())
        flight_recorder.enable(self.backend)
        self.notes, self._watched = LiveMessages.from_environment(), LiveMessages.from_environment()
        newest = self.notes.formation()
        self.formation = replace(newest, generation=0, members=(name,)) if joins else newest
        self._newest = newest
        """Latest formation that the watching thread has seen."""
        self.part = None if joins and newest.replica_size > 1 else self.formation.part_of(name)
        """Part of the training state that this worker holds or is prepared for."""
        self._unreported_losses: list[str] = []
        """Descriptions of the losses since the last formation that trained."""
        self.failed_attempts = 0
        """Number of failed attempts to open a group, in a row and without a loss."""
        self.is_wanted = False
        self._left: list[dist.ProcessGroup] = []
        """Groups that were abandoned and are not freed yet."""
        self._has_left = threading.Event()
        """Whether this process has abandoned the current formation."""
        self._thread = threading.get_ident()
        self._lost = threading.Event()
        """Whether a member of the current formation is lost."""
        self._formation_lock = threading.Lock()
        """Lock held while the current formation is replaced or abandoned."""
        threading.Thread(target=self._watch, name="formations", daemon=True).start()

    @classmethod
    def from_environment(cls, timeout_seconds: float) -> "LiveGroup | None":
        """Return an instance if the launcher recovers live, else None."""
        name = os.environ.get(NAME)
        return cls(name, joins=JOINS in os.environ, timeout_seconds=timeout_seconds) if name else None

    @property
    def world(self) -> World:
        members = self.formation.members
        here = [name for name in members if machine_of(name) == machine_of(self.name)]
        rank, local_rank = members.index(self.name), here.index(self.name)
        return World(rank=rank, size=len(members), local_rank=local_rank, local_size=len(here), has_agent=True)

    def explains(self, error: BaseException) -> bool:
        """Return whether an error comes from the loss of a member; waits a moment for the launcher's notice."""
        if isinstance(error, PeerLost) or is_lost_peer(error):
            return True
        return isinstance(error, RuntimeError) and self._lost.wait(NOTICE_SECONDS)

    def leave(self) -> None:
        """Abandon the current group, which `release` has to follow."""
        self._has_left.set()
        _shut_down()
        if dist.is_initialized():
            self._left += dist.distributed_c10d._world.pg_map
            dist.destroy_process_group()

    def end_for_good(self) -> None:
        """End this process, which no other replaces; the others go on."""
        self.notes.leave(self.name)
        os.kill(os.getpid(), signal.SIGKILL)

    def release(self) -> None:
        """Free the groups that were left, and their threads, once nothing here needs them any more.

        In another thread: Gloo at times misses that the connection for a send is closed, and then keeps a thread, and
        the one that frees its group, until the timeout.
        """
        left, self._left = self._left, []
        del meetings[:-2]
        gc.collect()  # of what refers to them
        threading.Thread(target=left.clear, name="groups that were left", daemon=True).start()

    @contextmanager
    def as_part(self) -> Iterator[None]:
        """Let a worker that joins build, alone, its part of a training state that several processes hold together.
        Waits for the part that is assigned to it; collectives with the others are imitated."""
        if not self.joins or self.formation.replica_size == 1:
            yield
            return
        newest = self._newest
        self.notes.report(self.name, WorkerReport(generation=newest.generation, position=Position(), part=None))
        with activity.waiting_in("the part of the training state to prepare for"):
            while self.name not in newest.assigned:
                newest = self.notes.formation(after=newest.version)
        self.part = newest.assigned[self.name]
        dist.destroy_process_group()
        dist.init_process_group("fake", store=dist.HashStore(), rank=self.part, world_size=newest.replica_size)
        yield
        dist.destroy_process_group()
        self.open_alone()

    def regroup(self, position: Position, left_out: Callable[[], None]) -> Formation:
        """Report this worker's position, wait for the next formation and open its group. `left_out` is called if the
        others continue without this worker, until there are enough for a further replica.

        Raises DistError when the launcher is lost, LaunchError where the members cannot connect to each other.
        """
        while True:
            position = self._wait_for_formation(position, left_out)
            try:
                self._open()
            except (PeerLost, RuntimeError) as error:  # a member was lost meanwhile
                self.leave()
                self._count_failure(error)
            else:
                self.failed_attempts = 0
                return self.formation

    def _count_failure(self, error: Exception) -> None:
        self.failed_attempts = 0 if self.formation.losses else self.failed_attempts + 1
        if self.failed_attempts == MOST_ATTEMPTS:
            raise LaunchError(
                f"the processes cannot connect to each other, after {MOST_ATTEMPTS} attempts "
                f"({str(error).splitlines()[0]}): check the firewall between the machines, and launch.interface"
            ) from None

    def untold_losses(self) -> tuple[str, ...]:
        """Return the descriptions of lost members, for the user; each only once."""
        losses, self._unreported_losses = tuple(self._unreported_losses), []
        return losses

    def _wait_for_formation(self, position: Position, left_out: Callable[[], None]) -> Position:
        """Wait until this worker is a member of one -> its position: none, once the others went on without it."""
        newest = self.formation
        while True:
            generation = newest.generation
            report = WorkerReport(generation=generation, position=position, part=self.part)
            self.notes.report(self.name, report)
            with activity.waiting_in("the new process group"):
                while newest.generation <= generation:
                    newest = self.notes.formation(after=newest.version)
            if self.name not in newest.members:
                position = Position()
                left_out()
            elif not newest.is_broken:
                break
        with self._formation_lock:
            self._lost.clear()
            self._has_left.clear()
            self.is_wanted, self.formation = False, newest
            self._unreported_losses += newest.losses
            self._compare(self._newest)  # the other thread may have seen already that it is broken
        return position

    def _open(self) -> None:
        if dist.is_initialized():  # that of a process which joins: until now it was alone
            dist.destroy_process_group()
        world = self.world
        connect, regular = timedelta(seconds=CONNECT_SECONDS), timedelta(seconds=self.timeout_seconds)
        if world.size == 1:
            self.open_alone()
            return
        meetings.append(store_at(Endpoint.parse(self.formation.meeting), timeout=connect))
        store = dist.PrefixStore(f"formation-{self.formation.generation}", meetings[-1])
        with self._formation_lock:
            if self._lost.is_set():  # before there was a client of the store to shut down
                raise PeerLost("a member was lost before the group was opened")
        dist.distributed_c10d._world.group_count = 0  # an attempt that has failed counts, and names the next group
        dist.init_process_group(self.backend, store=store, rank=world.rank, world_size=world.size, timeout=connect)
        authenticate(world_group(), secret_of_run())  # which all have opened then
        dist.distributed_c10d._set_pg_timeout(regular)
        if self._lost.is_set():
            raise PeerLost("a member was lost while the group was opened")

    def open_alone(self) -> None:
        timeout = timedelta(seconds=self.timeout_seconds)
        dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

    def _watch(self) -> None:
        """Watch each formation that is published, until the launcher ends."""
        with suppress(dist.DistError):
            while True:
                newest = self._watched.formation(after=self._newest.version)
                with self._formation_lock:
                    self._newest = newest
                    self._compare(newest)

    def _compare(self, newest: Formation) -> None:
        own = self.formation.generation
        if newest.generation == own:
            self.is_wanted = newest.is_wanted
        is_over = newest.generation > own or (newest.generation == own and newest.is_broken)
        if own and is_over and not self._lost.is_set():
            self._lost.set()
            _shut_down()
            threading.Thread(target=self._end_if_stuck, args=(own,), name="stuck", daemon=True).start()

    def _end_if_stuck(self, generation: int) -> None:
        """End this process, which another replaces, if Gloo does not notice that its connections are closed."""
        before = None
        while not self._has_left.wait(STUCK_SECONDS) and self.formation.generation == generation:
            waits = activity.waits_for_others(self._thread)
            if waits and waits == before and waits != activity.SAVE:
                sys.stderr.write(f"{waits} does not end though its connections are closed: this process is killed\n")
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            before = waits


def _shut_down() -> None:
    """Wake all threads that wait in the current group, or for the address of a process that will not come."""
    shut_down_connections()
    abort_nccl()  # after it: what follows on Gloo fails wherever the results of NCCL may be invalid
    for meeting in meetings[-1:]:
        if isinstance(meeting, StoreClient):
            meeting.shut_down()
