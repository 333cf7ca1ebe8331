"""What the launcher and the workers tell each other with launch.recovery=live, as notes in the rendezvous store.

The launcher publishes formations: who trains together from now on. A worker reports its position when it needs a new
one. Notes are whole states, so nothing depends on who reads when.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

NAME, JOINS, TERMINAL = "LOCKSTEP_LIVE", "LOCKSTEP_LIVE_JOINS", "LOCKSTEP_LIVE_TERMINAL"
"""Variables of a worker: its name; whether it joins a run in progress; descriptors of the launcher's terminal."""
PATIENCE = timedelta(seconds=10)
"""Timeout of a note; a store that takes longer counts as lost."""
FOR_EVER = timedelta(days=365)
"""Of waiting for news: a store that is lost closes the connection."""
NOTHING = -1
"""The step of a worker that has no training state yet."""


@dataclass(frozen=True, order=True)
class Position:
    """How far a worker's training state is."""

    step: int = NOTHING
    """Finished steps."""
    settled: int = NOTHING
    """The last step that was also evaluated, saved and published, as far as that was due."""


@dataclass(frozen=True, kw_only=True)
class Formation:
    """The workers that train together."""

    version: int = 0
    """Counts what has been published."""
    generation: int
    """From 1."""
    members: tuple[str, ...]
    """Their names, in the order of ranks."""
    positions: tuple[Position, ...] = ()
    """Of each member, as it was reported; empty for the first generation, which starts together."""
    losses: tuple[str, ...] = ()
    """What became of members of the last one, for the user."""
    is_broken: bool = False
    """Whether a member is lost, so that the others need a new formation."""
    is_wanted: bool = False
    """Whether the members are to come for a new formation after their present step, since another worker waits."""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> "Formation":
        plain: Mapping[str, Any] = json.loads(text)
        positions = tuple(Position(**position) for position in plain["positions"])
        lists = {name: tuple(plain[name]) for name in ("members", "losses")}
        return cls(**{**plain, **lists, "positions": positions})


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker waits for a formation that is newer than `generation`."""

    generation: int
    position: Position


def take_terminal() -> None:
    """Write to the launcher's terminal from here on, as rank 0 does."""
    for descriptor, terminal in zip((1, 2), os.environ[TERMINAL].split(","), strict=True):
        os.dup2(int(terminal), descriptor)


class LiveNotes:
    """A connection to the notes, for use by one thread. Methods raise DistError when the store is lost."""

    def __init__(self, host: str, port: int) -> None:
        self.store = TCPStore(host, port, timeout=PATIENCE, wait_for_workers=False)

    @classmethod
    def from_environment(cls) -> "LiveNotes":
        """To the store of this worker's launcher."""
        return cls(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def publish(self, formation: Formation) -> None:
        """Of the launcher: `version` has to be one more than the last."""
        self.store.set("live/formation", formation.text())
        self.store.set(f"live/version/{formation.version}", "")

    def formation(self, *, after: int = 0) -> Formation:
        """The newest one; waits for a later version than `after`."""
        self.store.wait([f"live/version/{after + 1}"], FOR_EVER)
        return Formation.parse(self.store.get("live/formation"))

    def report(self, name: str, report: WorkerReport) -> None:
        self.store.set(f"live/report/{name}", json.dumps(asdict(report)))
        self.store.add("live/reports", 1)

    @property
    def num_reports(self) -> int:
        """How many reports have been made so far."""
        return int(self.store.add("live/reports", 0))

    def reported(self, name: str) -> WorkerReport | None:
        """The last report of a worker, if it has made one."""
        key = f"live/report/{name}"
        if not self.store.check([key]):
            return None
        plain = json.loads(self.store.get(key))
        return WorkerReport(generation=plain["generation"], position=Position(**plain["position"]))

    def start_training(self) -> None:
        """All members of the first generation have built everything: from here on, a loss does not end the round."""
        self.store.set("live/training", "")

    def is_training(self) -> bool:
        return self.store.check(["live/training"])
