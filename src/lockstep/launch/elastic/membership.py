"""The nodes of a run: which have joined, which are lost, and the current round, which the leader (node 0, or its
successor) decides for all.

Each node publishes one entry on the store and reads the round that the leader publishes. Entries are whole states, not
messages, so nothing depends on the order of reads. A node is lost when its heartbeat counter has not changed for
`launch.failure_timeout_seconds` by the reader's clock: clocks are never compared.
"""

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout
from pydantic import TypeAdapter
from pydantic_core import to_json
from torch.distributed import DistError, Store

from lockstep.base.errors import LaunchError, PeerLost
from lockstep.launch.elastic import join_checks
from lockstep.launch.launch_config import LaunchSection
from lockstep.protocol import run_secret
from lockstep.protocol.live_messages import STATE, Formation, MachineState
from lockstep.protocol.rendezvous import LOOPBACK, Endpoint, address_to, greeted, serve_store
from lockstep.protocol.store_client import StoreClient
from lockstep.protocol.store_server import StoreServer

HEARTBEAT_SECONDS, LIVE_HEARTBEAT_SECONDS = 0.25, 0.1
BUSY_HEARTBEAT_SECONDS = 0.02
"""Pause between heartbeats with live recovery while the machines agree on a new formation."""
LEAD = ".leader.lock"
"""Lock file in the run's folder, held by the leader with live recovery."""
NOTE = ".leader.json"
"""File in the run's folder, with live recovery: {"endpoint"} of a leader that is not node 0."""


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """One start of all worker groups, from rendezvous to the end of the workers."""

    number: int = 0
    """Number of the round, from 1; 0 while the first rendezvous goes on."""
    members: tuple[int, ...] = ()
    """Indices of the nodes that take part, in the order of ranks."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all of them start with: {"resume", "max_processes", "port", "sizes"}."""
    end_reason: str = ""
    """Why all members end this round now, if they do."""
    is_graceful: bool = False
    """Whether their workers may save a checkpoint first."""
    leader: int = 0
    """The node that decides; another than node 0 where that was lost and training went on."""
    term: int = 0
    """How often another node has become the leader."""
    standbys: Mapping[str, str] = field(default_factory=dict)
    """HOST:PORT of the store that each member, by index, serves if it becomes the leader (live recovery)."""
    evicted: tuple[int, ...] = ()
    """Nodes that were declared lost and have to leave: none may rejoin with its old state."""
    replaced: tuple[int, ...] = ()
    """Evicted nodes that have come back, or for which the scheduler was asked for another node."""
    formation: Formation = Formation()
    """Newest formation of this round (live recovery)."""
    result: Mapping[str, Any] | None = None
    """How the run ended, once it has: {"code", "text"}."""


ROUND = TypeAdapter(RoundState)
"""Reader of its JSON."""


class Membership:
    """A node's connection to the others: open it with `with`, then `join` a run."""

    def __init__(
        self, endpoint: Endpoint | None, node_rank: int | None, section: LaunchSection, *, follows: bool = False
    ) -> None:
        """`endpoint` None: a single node. `node_rank` None: the leader is the machine that the endpoint points to.
        `follows`: another node is the leader, whatever `node_rank` is."""
        self.endpoint = endpoint or Endpoint(host=LOOPBACK, port=0)
        self.is_alone = endpoint is None
        is_first = node_rank == 0 if node_rank is not None else self.is_alone or self.endpoint.is_local()
        self.is_leader = is_first and not follows
        self.standby: StoreServer | None = None
        """Store that this node serves if it becomes the leader, with live recovery on several nodes."""
        self.lead: FileLock | None = None
        """Lock in the run's folder, on the leader with live recovery on several nodes."""
        self.section = section
        self.index = 0
        """This node's number in the order of joining."""
        self.round = RoundState()
        self.entries: dict[int, dict[str, Any]] = {}
        """Entries of all nodes, its own included, on the leader."""
        self.last_contact = time.monotonic()
        """Time of the store's last answer."""
        self._entry: dict[str, Any] = {
            "node_rank": 0 if self.is_leader else node_rank,
            "host": platform.node(),
            "process": os.getpid(),
            "heartbeat": 0,
        }
        self._heartbeats: dict[int, tuple[int, float]] = {}
        """Node -> its last heartbeat and the time at which that was read."""
        self._failure_times: dict[tuple[int, int], float] = {}
        self._nonce_file: Path | None = None
        """File by which the others check that they see the same folder, on the leader."""
        self._changed = threading.Condition()
        self._closed, self._is_due = threading.Event(), threading.Event()
        """Set for the thread to end; set for it to send a heartbeat at once."""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.store: Store
        if self.is_leader:
            self.store = serve_store(self.endpoint)
        else:
            self.store = greeted(self.endpoint, seconds=self.section.join_timeout_seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._is_due.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        if self.lead is not None:
            self.lead.release()
        if self._nonce_file is not None:
            self._nonce_file.unlink(missing_ok=True)
        for store in {self.store, self.standby}:
            if isinstance(store, StoreServer):
                store.close()

    @property
    def name(self) -> str:
        return f"node {self.index} ({platform.node()})"

    @property
    def is_replacement(self) -> bool:
        """Whether this node was started in the place of a lost one, by a job of its own: see node.Replacements."""
        rank = self._entry["node_rank"]
        return self.section.recovers_live and rank is not None and rank >= self.section.max_nodes

    @property
    def can_withdraw(self) -> bool:
        """Whether a signal to this node ends only this node: the others go on without it."""
        return self.is_replacement and not self.is_leader

    # ---- joining

    def agree_on_name(self, name: str) -> str:
        """Return the leader's name of the run. Raises Rejection for another version of Lockstep or torch."""
        if self.is_leader:
            return name
        assert isinstance(self.store, StoreClient)
        join_checks.check_versions(self.store)
        return self.store.greeting["run"]

    def join(self, folder: Path) -> None:
        """Join the run in this folder, which all nodes have to share. Raises LaunchError."""
        if self.is_leader:
            self.index = self._next_index()  # 0: the others wait for the leader's info
            if self._can_succeed and not self.take_lead(folder):
                raise LaunchError(f"another process leads this run: it has locked {folder / LEAD}")
            self.introduce(self.store, folder)
        else:
            assert isinstance(self.store, StoreClient)
            seconds = self.section.join_timeout_seconds / 2  # while the leader still waits
            self.store = join_checks.join(self.store, folder, seconds=seconds)
            self.index = self._next_index()
        self.last_contact = time.monotonic()
        if self._can_succeed:
            host = address_to(self.endpoint) or self.endpoint.host
            self.standby = serve_store(Endpoint(host=host, port=0)).open_to(run_secret.read(folder))
            self._entry["standby"] = str(Endpoint(host=host, port=self.standby.port))
        if not self.is_alone:
            self._start_heartbeats()

    @property
    def _can_succeed(self) -> bool:
        """Whether another node takes the place of a leader that is lost."""
        return self.section.recovers_live and not self.is_alone

    def take_lead(self, folder: Path) -> bool:
        """Lock the run's folder for the leader -> whether no other process holds the lock."""
        lock = FileLock(folder / LEAD, timeout=0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            (folder / NOTE).unlink(missing_ok=True)
        except (Timeout, OSError):  # or the file system has no locks
            return False
        self.lead = lock
        return True

    def introduce(self, store: Store, folder: Path) -> None:
        assert isinstance(store, StoreServer)
        if not self.is_alone:
            self._nonce_file = join_checks.introduce(store, folder)

    def _next_index(self) -> int:
        return self.store.add("nodes", 1) - 1

    def rejection(self) -> LaunchError | None:
        """Return why a node cannot join, if one has reported it to the leader."""
        assert isinstance(self.store, StoreServer)
        reported = self.store.rejection
        return join_checks.Rejection(reported["text"], code=reported["code"]) if reported else None

    # ---- publishing and waiting

    def publish(self, **values: Any) -> None:
        """Add values to this node's entry."""
        with self._changed:
            self._entry |= values
            self.entries[self.index] = dict(self._entry)
        self._is_due.set()

    @property
    def entry(self) -> dict[str, Any]:
        """Copy of the entry that this node publishes."""
        with self._changed:
            return dict(self._entry)

    def move_to(self, store: Store, endpoint: Endpoint, *, entries: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Switch to another leader's store, or with `entries` of the others to this node's own, as the leader."""
        now = time.monotonic()
        with self._changed:
            self.store, self.endpoint, self.is_leader = store, endpoint, entries is not None
            self.last_contact = now
            self.entries = {self.index: dict(self._entry), **(entries or {})}
            self._heartbeats = {index: (entry["heartbeat"], now) for index, entry in (entries or {}).items()}
        self._start_heartbeats()

    def publish_round(self, **changes: Any) -> RoundState:
        """Change the round for all nodes, as the leader."""
        with self._changed:
            self.round = replace(self.round, **changes)
            standbys = {str(i): self.entries.get(i, {}).get("standby", "") for i in self.round.members}
            self.round = replace(self.round, standbys={**self.round.standbys, **standbys})
            self._changed.notify_all()
        self.store.set("round", to_json(self.round).decode())
        return self.round

    def evict(self, indices: Iterable[int]) -> None:
        """Declare nodes lost, as the leader."""
        if new := [index for index in indices if index not in self.round.evicted]:
            self.publish_round(evicted=(*self.round.evicted, *new))

    def wait(self, condition: Callable[[], bool], *, seconds: float | None = None) -> bool:
        """Wait for a condition -> whether it holds. Raises PeerLost if the leader is lost, or evicted this node."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not condition():
                if deadline is not None and time.monotonic() > deadline:
                    return False
                if text := self.disconnected():
                    raise PeerLost(text)
                self._changed.wait(HEARTBEAT_SECONDS)
        return True

    def disconnected(self) -> str | None:
        """Return why this node cannot go on, if so: the leader does not answer, or has evicted it."""
        if self.is_leader:
            return None
        if self.index in self.round.evicted:
            return f"{self.name}: node {self.round.leader} declared this node lost, and goes on without it"
        seconds = time.monotonic() - self.last_contact
        if seconds > self.section.machine_timeout_seconds:
            return f"{self.name}: no answer from {self.endpoint} (node {self.round.leader}) for {seconds:.0f} s"
        return None

    # ---- what the leader knows of nodes

    def node_name(self, index: int) -> str:
        host = self.entries.get(index, {}).get("host") or self.round.standbys.get(str(index), "").rpartition(":")[0]
        return f"node {index} ({host})"

    def outcome(self, index: int, number: int) -> dict[str, Any] | None:
        """Return how a round ended on a node, if it has: {"round", "failure"}."""
        outcome = self.entries.get(index, {}).get("outcome") or {}
        return outcome if outcome.get("round") == number else None

    @property
    def meeting(self) -> Endpoint:
        """Address of the round's store, through which its processes connect."""
        return replace(self.endpoint, port=self.round.plan["port"])

    def machine_states(self, number: int) -> dict[int, MachineState]:
        """Return the states of the other members that have started this round (live recovery)."""
        plain = {i: self.entries.get(i, {}).get("live") for i in self.round.members if i != self.index}
        return {i: STATE.validate_python(each) for i, each in plain.items() if each and each["round"] == number}

    def seconds_since_failure(self, index: int, number: int) -> float:
        """Return the seconds since the leader learned that a round failed on a node; 0 if it has not."""
        outcome = self.outcome(index, number)
        if outcome is None or outcome["failure"] is None:
            return 0.0
        return self.last_contact - self._failure_times.setdefault((index, number), self.last_contact)

    def seconds_since_heartbeat(self, index: int) -> float:
        """Return the seconds from a node's last heartbeat to the last read of its entry; 0 for a node that has left."""
        if index not in self._heartbeats or self.entries[index].get("left"):
            return 0.0
        return self.last_contact - self._heartbeats[index][1]

    def is_lost(self, index: int) -> bool:
        """Return whether a node was evicted, has withdrawn, has missed its heartbeats, or was started a second time."""
        entry = self.entries.get(index, {})
        if index in self.round.evicted or entry.get("has_withdrawn"):
            return True
        is_replaced = any(
            later > index and other["node_rank"] == entry.get("node_rank") is not None
            for later, other in self.entries.items()
        )
        return is_replaced or self.seconds_since_heartbeat(index) > self.section.machine_timeout_seconds

    def present(self) -> list[int]:
        """List the nodes that could take part in a round, in the order of ranks."""
        present = [
            i
            for i, entry in self.entries.items()
            if "processes" in entry and not self.is_lost(i) and not entry.get("left")  # a node publishes it last
        ]
        rank = {i: self.entries[i]["node_rank"] for i in present}
        return sorted(present, key=lambda i: (i != 0, i if rank[i] is None else rank[i], i))

    # ---- the heartbeat thread

    def _start_heartbeats(self) -> None:
        """Start a thread for this store: one that waits for a machine that is lost may wait for long."""
        self._thread = threading.Thread(target=self._heartbeat_loop, args=(self.store,), name="membership", daemon=True)
        self._thread.start()

    def _heartbeat_loop(self, store: Store) -> None:
        is_last = False
        while not is_last and store is self.store:
            self._is_due.wait(self._pause_seconds)
            self._is_due.clear()
            is_last = self._closed.is_set()
            with suppress(DistError, RuntimeError):
                self._heartbeat(store)

    @property
    def _pause_seconds(self) -> float:
        """Pause between two heartbeats."""
        if not self.section.recovers_live:
            return HEARTBEAT_SECONDS
        is_busy = self.round.formation.is_broken or self.round.formation.is_wanted
        return BUSY_HEARTBEAT_SECONDS if is_busy else LIVE_HEARTBEAT_SECONDS

    def _heartbeat(self, store: Store) -> None:
        with self._changed:
            self._entry["heartbeat"] += 1
            text = json.dumps(self._entry)
        store.set(f"node-{self.index}", text)
        if self.is_leader:
            self._read_entries(store)
        elif store.check(["round"]):
            state = ROUND.validate_json(store.get("round"))
            with self._changed:
                if store is self.store:
                    self.round = state
        with self._changed:
            if store is self.store:
                self.last_contact = time.monotonic()
                self._changed.notify_all()

    def _read_entries(self, store: Store) -> None:
        known = self._heartbeats  # an entry stays: a heartbeat costs the same with any number of nodes
        keys = [f"node-{i}" for i in range(store.add("nodes", 0)) if i in known or store.check([f"node-{i}"])]
        entries = {int(k[5:]): json.loads(text) for k, text in zip(keys, store.multi_get(keys), strict=True)}
        now = time.monotonic()
        with self._changed:
            if store is not self.store:  # that of an earlier leader, which has just answered after all
                return
            for index, entry in entries.items():
                if self._heartbeats.get(index, (-1, 0.0))[0] != entry["heartbeat"]:
                    self._heartbeats[index] = entry["heartbeat"], now
            self.entries = entries
