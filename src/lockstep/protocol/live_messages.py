"""Messages between launchers and workers with launch.recovery=live.

Each machine has a store of its own, in which its launcher publishes formations (which workers train together) and
its workers report their positions when they need a new one. The launchers of several machines exchange the states of
their machines, and the newest formation, through the rendezvous. All of these are whole states, so nothing depends on
the order of reads.
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from pydantic import TypeAdapter
from pydantic_core import to_json
from torch.distributed import Store

from lockstep.protocol import run_secret
from lockstep.protocol.rendezvous import LOOPBACK, Endpoint
from lockstep.protocol.store_client import StoreClient, connected

NAME, JOINS, TERMINAL = "LOCKSTEP_LIVE", "LOCKSTEP_LIVE_JOINS", "LOCKSTEP_LIVE_TERMINAL"
"""Variables of a worker: its name; whether it joins a run in progress; descriptors of the launcher's terminal."""
PORT = "LOCKSTEP_LIVE_PORT"
"""Variable of a worker: the port of its machine's store."""
SHIELDED = "LOCKSTEP_LIVE_SHIELDED"
"""Variable of a worker: whether only SHIELDED_STOP asks it to stop. Its machine has a scheduler's job of its own, whose
end is not the run's, and a scheduler signals all processes of a job."""
SHIELDED_STOP = getattr(signal, "SIGUSR1", signal.SIGTERM)
PATIENCE = timedelta(seconds=10)
"""Timeout of a note; a store that takes longer counts as lost."""
FOR_EVER = timedelta(days=365)
"""Timeout of waiting for a formation: a store that is lost closes the connection."""
NOTHING = -1
"""The step of a worker that has no training state yet."""


def is_live_worker() -> bool:
    """Return whether the launcher of this worker recovers live."""
    return NAME in os.environ


def ignored_signals() -> frozenset[int]:
    """Return the signals that do not ask this worker to stop."""
    return frozenset({signal.SIGTERM, signal.SIGINT} - {SHIELDED_STOP}) if SHIELDED in os.environ else frozenset()


@dataclass(frozen=True, order=True)
class Position:
    """Progress of a worker's training state."""

    step: int = NOTHING
    """Finished steps."""
    settled: int = NOTHING
    """The last step that was also evaluated, saved and published, as far as that was due; NOTHING before the first."""
    is_ready: bool = False
    """Whether the next step only has to be applied here: all gradients of this worker's part are complete."""

    @property
    def has_state(self) -> bool:
        """Whether there is a training state that others could take."""
        return self.step != NOTHING


@dataclass(frozen=True, kw_only=True)
class Formation:
    """The workers that train together."""

    version: int = 0
    """Number of published changes."""
    generation: int = 0
    """Number of the set of members, from 1; 0 before the first."""
    members: tuple[str, ...] = ()
    """Names of the workers, in the order of ranks."""
    positions: tuple[Position, ...] = ()
    """Reported position of each member; empty for the first generation, which starts together."""
    replica_size: int = 1
    """Number of members that hold the training state together: rank r holds part r modulo this number."""
    num_waiting: int = 0
    """Number of further workers, too few for another replica."""
    assigned: Mapping[str, int] = field(default_factory=dict)
    """Joining worker -> the part of the training state to prepare for."""
    losses: tuple[str, ...] = ()
    """Messages about lost members of the last formation, for the user."""
    meeting: str = ""
    """HOST:PORT of the store through which the members connect."""
    is_broken: bool = False
    """Whether a member is lost, so that the others need a new formation."""
    is_wanted: bool = False
    """Whether the members have to ask for a new formation after their present step, since others can join or leave."""
    is_training: bool = False
    """Whether the first generation has built everything: from here on, a loss does not end the round."""
    is_over: bool = False
    """Whether rank 0 has ended regularly."""

    @property
    def machines(self) -> tuple[int, ...]:
        """Machines of the members."""
        return tuple(dict.fromkeys(map(machine_of, self.members)))

    def part_of(self, name: str) -> int:
        """Return the part of the training state that a member holds."""
        return self.members.index(name) % self.replica_size


def worker_name(machine: int, slot: int, start: int) -> str:
    """Return the name of the `start`-th process in a slot of a machine."""
    return f"{machine}.{slot}.{start}"


def machine_of(name: str) -> int:
    return int(name.partition(".")[0])


def slot_here() -> int | None:
    """Return the slot of this process on its machine, which its successor takes over; None without live recovery."""
    name = os.environ.get(NAME)
    return int(name.split(".")[1]) if name else None


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """Report of a worker that waits for a formation newer than `generation`."""

    generation: int
    position: Position
    part: int | None = 0
    """Part of the training state that it holds or is prepared for; None: of none yet."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    code: int
    """Exit code; negative: the signal that ended it."""
    text: str
    """Message for the user."""


@dataclass(frozen=True, kw_only=True)
class MachineState:
    """The workers of a machine."""

    round: int
    """Number of their round."""
    workers: Mapping[str, WorkerReport | None]
    """Last report of each running worker, by name."""
    exits: Mapping[str, Exit] = field(default_factory=dict)
    """Members of the formation that have ended."""
    leaving: tuple[str, ...] = ()
    """Workers that `lockstep resize` removes."""
    spares: tuple[str, ...] = ()
    """Workers that wait to take the place of a lost one."""
    is_training: bool = False
    """Whether the members train, as far as is known here."""
    formation: Formation = Formation()
    """Newest formation that is known here."""


FORMATION, REPORT, STATE = TypeAdapter(Formation), TypeAdapter(WorkerReport), TypeAdapter(MachineState)
"""Readers of their JSON."""


def store_at(endpoint: Endpoint, *, timeout: timedelta) -> StoreClient:
    """Connect to a store of this run, as one of its workers. Raises DistError."""
    return connected(endpoint.host, endpoint.port, secret_of_run(), timeout=timeout)


def secret_of_run() -> bytes:
    return run_secret.read(Path(os.environ[run_secret.VARIABLE]))


def take_terminal() -> None:
    """Write to the launcher's terminal from here on, as rank 0 does."""
    for descriptor, terminal in zip((1, 2), os.environ[TERMINAL].split(","), strict=True):
        os.dup2(int(terminal), descriptor)


class LiveMessages:
    """The machine's store, for use by one thread. Methods raise DistError when it is lost."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._published = 0

    @classmethod
    def from_environment(cls) -> "LiveMessages":
        """Connect to the store of this worker's launcher."""
        return cls(store_at(Endpoint(host=LOOPBACK, port=int(os.environ[PORT])), timeout=PATIENCE))

    def publish(self, formation: Formation) -> None:
        self.store.set("formation", to_json(formation).decode())
        for version in range(self._published + 1, formation.version + 1):
            self.store.set(f"version/{version}", "")
        self._published = formation.version

    def formation(self, *, after: int = 0) -> Formation:
        """Return the newest formation, once its version is later than `after`."""
        self.store.wait([f"version/{after + 1}"], FOR_EVER)
        return FORMATION.validate_json(self.store.get("formation"))

    def report(self, name: str, report: WorkerReport) -> None:
        self.store.set(f"report/{name}", to_json(report).decode())
        self.store.add("reports", 1)

    def leave(self, name: str) -> None:
        """Announce that a worker ends for good."""
        self.store.set(f"left/{name}", "")

    def has_left(self, name: str) -> bool:
        return self.store.check([f"left/{name}"])

    @property
    def num_reports(self) -> int:
        return int(self.store.add("reports", 0))

    def reported(self, name: str) -> WorkerReport | None:
        """Return the last report of a worker, if any."""
        key = f"report/{name}"
        return REPORT.validate_json(self.store.get(key)) if self.store.check([key]) else None

    def start_training(self) -> None:
        """Announce, on rank 0, that all members of the first generation have built everything."""
        self.store.set("training", "")

    def is_training(self) -> bool:
        return self.store.check(["training"])
