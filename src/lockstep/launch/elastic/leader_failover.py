"""Succession of a lost leader, with launch.recovery=live on several machines: the workers train on meanwhile.

All nodes that miss the leader turn to the first of them, which decides from then on if most of the machines that train
together have come; of two machines the one that is left, once it has locked the run's folder, which the lost one no
longer does. The others stop, so that no two parts of a divided network go on.
"""

import json
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, Store

from lockstep.base import storage
from lockstep.base.errors import LaunchError
from lockstep.launch.elastic.join_checks import NONCE_PREFIX
from lockstep.launch.elastic.membership import NOTE, Membership, RoundState
from lockstep.launch.launch_config import LaunchSection
from lockstep.protocol import run_secret
from lockstep.protocol.rendezvous import STORE_TIMEOUT, Endpoint, answers
from lockstep.protocol.store_client import connected

GATHER_SECONDS, MARGIN_SECONDS = 3.0, 1.0
"""How much later than this node the others may miss the leader."""
POLL_SECONDS, ANSWER_SECONDS = 0.02, 1.0
LARGEST_NOTE = 4096


def other_leader(folder: Path, section: LaunchSection, *, waits: bool = False) -> Endpoint | None:
    """Return the address of this run's leader, if that is not node 0, and it answers. A restarted node 0 `waits` while
    the others may not have missed it yet."""
    if not section.recovers_live:
        return None
    other = _noted_leader(folder)
    if other is not None or not waits or not any(folder.glob(f"{NONCE_PREFIX}*")):
        return other
    seconds = section.machine_timeout_seconds + GATHER_SECONDS + MARGIN_SECONDS
    sys.stderr.write(
        f"an earlier node 0 of this run was killed, or still runs: waiting up to {seconds:.0f} s to see who decides\n"
    )
    end = time.monotonic() + seconds
    while other is None and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        other = _noted_leader(folder)
    return other


def _noted_leader(folder: Path) -> Endpoint | None:
    with suppress(OSError, ValueError, KeyError, TypeError, LaunchError):
        endpoint = Endpoint.parse(str(json.loads(storage.read_regular(folder / NOTE, LARGEST_NOTE))["endpoint"]))
        if answers(endpoint, seconds=ANSWER_SECONDS):
            return endpoint
    return None


def succeed(membership: Membership, folder: Path) -> bool:
    """Find a new leader, or become it -> whether there is one."""
    state = membership.round
    for index in [index for index in state.members if index != state.leader]:
        if index == membership.index:
            return _take_over(membership, state, folder)
        if _turn_to(membership, index, folder):
            return True
    return False


def _key(state: RoundState, index: int) -> str:
    return f"term-{state.term + 1}/{index}"


def _turn_to(membership: Membership, index: int, folder: Path) -> bool:
    """Wait for another node to become the leader -> whether it has."""
    state = membership.round
    endpoint = Endpoint.parse(state.standbys[str(index)])
    if not answers(endpoint, seconds=ANSWER_SECONDS):
        return False
    try:
        store = connected(endpoint.host, endpoint.port, run_secret.read(folder), timeout=STORE_TIMEOUT)
        entry = json.dumps(membership.entry)
        store.set(f"node-{membership.index}", entry)
        store.set(_key(state, membership.index), entry)
        store.wait([_key(state, -1)], timedelta(seconds=2 * GATHER_SECONDS))
    except (DistError, OSError):
        return False
    membership.move_to(store, endpoint)
    return True


def _take_over(membership: Membership, state: RoundState, folder: Path) -> bool:
    assert membership.standby is not None
    store, own = membership.standby, membership.index
    came = _gather_entries(store, state, [i for i in state.members if i not in {own, state.leader}])
    machines = set(state.formation.machines)
    here = 2 * len(machines & {own, *came})
    if here < len(machines) or not (membership.take_lead(folder) or here > len(machines)):
        return False
    members = (own, *came)
    endpoint = Endpoint.parse(membership.entry["standby"])
    store.add("nodes", 1 + max(*members, *state.members, *state.evicted))
    membership.introduce(store, folder)
    membership.move_to(store, endpoint, entries=came)
    membership.publish_round(
        **vars(state)
        | {
            "leader": own,
            "term": state.term + 1,
            "members": members,
            "plan": {**state.plan, "port": endpoint.port},
            "evicted": (*state.evicted, *(index for index in state.members if index not in members)),
        }
    )
    store.set(_key(state, -1), "")
    storage.write(folder / NOTE, json.dumps({"endpoint": str(endpoint)}))
    sys.stderr.write(f"node {state.leader} is lost: {membership.name} decides from here on\n")
    return True


def _gather_entries(store: Store, state: RoundState, others: list[int]) -> dict[int, dict[str, Any]]:
    """Return the entries of the nodes that turn to this one."""
    came: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + GATHER_SECONDS
    while len(came) < len(others) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        for index in [index for index in others if index not in came and store.check([_key(state, index)])]:
            came[index] = json.loads(store.get(_key(state, index)))
    return came
