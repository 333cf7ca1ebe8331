"""The machines of a run: who is there, who is lost, and what all of them do next, which node 0 decides for all.

Each node keeps one entry of its own on the store, and reads the one that node 0 keeps (the *word*). Entries are whole
states, not messages, so that nothing depends on who reads when. A node is lost when its entry has not changed for
`launch.failure_timeout_seconds` by the clock of whoever reads it: clocks are never compared.
"""

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed import DistError, TCPStore

from lockstep.base.errors import LaunchError, PeerLost
from lockstep.launch.elastic.rendezvous import LOOPBACK, Endpoint, connected, served
from lockstep.launch.launch_config import LaunchSection

BEAT_SECONDS = 0.25
SHARED_SECONDS = 60.0
"""A file that another machine has written may take so long to be seen: NFS keeps listings for up to a minute."""
NONCE = ".meeting-"


@dataclass(frozen=True, kw_only=True)
class Decision:
    attempt: int = 0
    """Which start this is, from 1; 0 while nodes are gathered."""
    members: tuple[int, ...] = ()
    """Who takes part in it, by the order of arrival, in the order of ranks."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """How all of them start."""
    over: str = ""
    """Why all members end this attempt now, if so."""
    kindly: bool = False
    """Whether their processes may save first."""
    lost: tuple[int, ...] = ()
    """Who was given up, and has to leave: nobody can be lost and come back as if nothing had been."""
    verdict: Mapping[str, Any] | None = None
    """How the run ended, once it has: {"code", "text"}."""


def versions() -> dict[str, str]:
    """What has to be the same on all nodes."""
    return {"Lockstep": version("lockstep-train"), "torch": str(torch.__version__)}


class Membership:
    """A node's connection to the others. Open it with `with`, `settle` on a run, then talk."""

    def __init__(self, endpoint: Endpoint | None, node_rank: int | None, section: LaunchSection) -> None:
        """`endpoint` None: this machine is alone. `node_rank` None: node 0 is the one that the endpoint points to."""
        self.endpoint = endpoint or Endpoint(host=LOOPBACK, port=0)
        self.is_alone = endpoint is None
        self.is_leader = node_rank == 0 if node_rank is not None else self.is_alone or self.endpoint.is_here()
        self.section = section
        self.index = 0
        """This node's place in the order of arrival."""
        self.word = Decision()
        self.others: dict[int, dict[str, Any]] = {}
        """On node 0: the entries of all nodes, its own among them."""
        self.heard = time.monotonic()
        """When the store last answered."""
        self._entry: dict[str, Any] = {
            "node_rank": 0 if self.is_leader else node_rank,
            "host": platform.node(),
            "process": os.getpid(),
            "beat": 0,
        }
        self._seen: dict[int, tuple[int, float]] = {}
        """Of each node, its last beat and when that was read."""
        self._failures: dict[tuple[int, int], float] = {}
        self._sign: Path | None = None
        """On node 0: a file that shows the others that they see the same folder."""
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="meeting", daemon=True)

    def __enter__(self) -> Self:
        if self.is_leader:
            self.store = served(self.endpoint)
        else:
            self.store = connected(self.endpoint, seconds=self.section.join_timeout_seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)
        if self._sign is not None:
            self._sign.unlink(missing_ok=True)

    @property
    def name(self) -> str:
        return f"node {self.index} ({platform.node()})"

    # ---- coming together

    def agreed(self, name: str) -> str:
        """The name of the run: node 0's. Raises LaunchError."""
        if self.is_leader:
            return name
        facts = self._facts()
        for what, here in versions().items():
            if facts[what] != here:
                raise self._refusal(
                    f"{platform.node()} has {what} {here}, but {facts['host']} (node 0) has {facts[what]}: "
                    "install the same on all machines"
                )
        return str(facts["run"])

    def settle(self, folder: Path) -> None:
        """Enter the run in this folder, which has to be the same on all nodes. Raises LaunchError."""
        if self.is_leader:
            self.index = self._arrived()  # the first: without the facts nobody else arrives
            nonce = secrets.token_hex(8)
            if not self.is_alone:
                folder.mkdir(parents=True, exist_ok=True)
                for sign in folder.glob(f"{NONCE}*"):
                    sign.unlink(missing_ok=True)
                self._sign = folder / f"{NONCE}{nonce}"
                self._sign.touch()
            facts = {**versions(), "run": folder.name, "host": platform.node(), "nonce": nonce}
            self.store.set("facts", json.dumps(facts))
        else:
            self._look_for(folder, self._facts())
            self.index = self._arrived()
        self.heard = time.monotonic()
        if not self.is_alone:
            self._thread.start()

    def _arrived(self) -> int:
        return self.store.add("arrived", 1) - 1

    def _facts(self) -> dict[str, str]:
        end = time.monotonic() + self.section.join_timeout_seconds
        while True:
            with suppress(DistError):
                return json.loads(self.store.get("facts"))
            if time.monotonic() > end:
                raise LaunchError(f"{self.endpoint} answers, but no run of Lockstep begins there: check --rendezvous")

    def _look_for(self, folder: Path, facts: Mapping[str, str]) -> None:
        end = time.monotonic() + min(SHARED_SECONDS, self.section.join_timeout_seconds / 2)  # node 0 still waits
        while time.monotonic() < end:
            with suppress(OSError):
                if f"{NONCE}{facts['nonce']}" in os.listdir(folder):  # listing it asks a file server anew
                    return
            time.sleep(BEAT_SECONDS)
        raise self._refusal(
            f"{folder} is not the same folder on {platform.node()} and on {facts['host']} (node 0): set run.dir to a "
            "folder that all machines share"
        )

    def _refusal(self, text: str) -> LaunchError:
        self.store.set("refused", text)
        return LaunchError(text)

    def refused(self) -> str | None:
        """On node 0: why a node cannot take part, if one has said so."""
        return self.store.get("refused").decode() if self.store.check(["refused"]) else None

    # ---- talking

    def tell(self, **facts: Any) -> None:
        with self._news:
            self._entry |= facts
            self.others[self.index] = dict(self._entry)

    def decide(self, word: Decision) -> None:
        with self._news:
            self.word = word
            self._news.notify_all()
        self.store.set("word", json.dumps(asdict(word)))

    def give_up(self, indices: Iterable[int]) -> None:
        """On node 0: have these nodes leave."""
        if more := [index for index in indices if index not in self.word.lost]:
            self.decide(replace(self.word, lost=(*self.word.lost, *more)))

    def wait(self, until: Callable[[], bool], *, seconds: float | None = None) -> bool:
        """Wait for something to be so, as news come in -> whether it is. Raises PeerLost when node 0 is lost, or has
        given this one up."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._news:
            while not until():
                if end is not None and time.monotonic() > end:
                    return False
                if self.is_cut_off():
                    raise PeerLost(self.cut_off_text())
                self._news.wait(BEAT_SECONDS)
        return True

    def is_cut_off(self) -> bool:
        """Whether the store, which another node serves, has been silent for too long, or this node was given up."""
        silence = time.monotonic() - self.heard
        return not self.is_leader and (silence > self.section.failure_timeout_seconds or self.index in self.word.lost)

    def cut_off_text(self) -> str:
        if self.index in self.word.lost:
            return f"{self.name}: node 0 took this one for lost, and goes on without it"
        return f"{self.name}: no answer from {self.endpoint} (node 0) for {time.monotonic() - self.heard:.0f} s"

    def called(self, index: int) -> str:
        """On node 0: how to call a node."""
        return f"node {index} ({self.others[index]['host']})"

    def outcome(self, index: int, attempt: int) -> dict[str, Any] | None:
        """On node 0: how an attempt ended on a node, if it has: {"attempt", "failure"}."""
        found = self.others.get(index, {}).get("outcome") or {}
        return found if found.get("attempt") == attempt else None

    def failed_for(self, index: int, attempt: int) -> float:
        """On node 0: for how many seconds it is known that an attempt has failed on a node; 0 where it has not."""
        outcome = self.outcome(index, attempt)
        if outcome is None or outcome["failure"] is None:
            return 0.0
        return self.heard - self._failures.setdefault((index, attempt), self.heard)

    def silence(self, index: int) -> float:
        """On node 0: seconds from the last change of a node's entry to the last look at it; 0 for one that has left."""
        if index not in self._seen or self.others[index].get("left"):
            return 0.0
        return self.heard - self._seen[index][1]

    def is_lost(self, index: int) -> bool:
        """On node 0: whether a node is to be given up, as it is silent or has been started once more, or was before."""
        if index in self.word.lost:
            return True
        entry = self.others.get(index, {})
        again = any(
            later > index and other["node_rank"] == entry.get("node_rank") is not None
            for later, other in self.others.items()
        )
        return again or self.silence(index) > self.section.failure_timeout_seconds

    def present(self) -> list[int]:
        """On node 0: who could take part in an attempt, in the order of ranks."""
        there = [i for i, entry in self.others.items() if not self.is_lost(i) and not entry.get("left")]
        rank = {i: self.others[i]["node_rank"] for i in there}
        return sorted(there, key=lambda i: (i != 0, i if rank[i] is None else rank[i], i))

    def _talk(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(BEAT_SECONDS)
            with suppress(DistError, RuntimeError):
                self._exchange(self.store)

    def _exchange(self, store: TCPStore) -> None:
        with self._news:
            self._entry["beat"] += 1
            text = json.dumps(self._entry)
        store.set(f"node-{self.index}", text)
        if self.is_leader:
            self._read_entries(store)
        elif store.check(["word"]):
            word = Decision(**json.loads(store.get("word")))
            with self._news:
                self.word = word
        with self._news:
            self.heard = time.monotonic()
            self._news.notify_all()

    def _read_entries(self, store: TCPStore) -> None:
        keys = [f"node-{i}" for i in range(store.add("arrived", 0))]
        there = [key for key in keys if store.check([key])]
        entries = {int(k[5:]): json.loads(text) for k, text in zip(there, store.multi_get(there), strict=True)}
        now = time.monotonic()
        with self._news:
            for index, entry in entries.items():
                if self._seen.get(index, (-1, 0.0))[0] != entry["beat"]:
                    self._seen[index] = entry["beat"], now
            self.others = entries
