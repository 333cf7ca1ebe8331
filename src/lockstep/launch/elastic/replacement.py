"""Other machines in the place of lost ones, with live recovery, where a scheduler can start them."""

import sys
import threading
from collections.abc import Callable
from functools import partial

from lockstep.base.errors import LaunchError
from lockstep.launch.elastic.membership import Membership

Replace = Callable[[int, str], str]
"""Has a machine with a node rank started that joins at a rendezvous -> what happens, for the user; or LaunchError."""


def replace_lost(membership: Membership, replace: Replace) -> None:
    """On the leader: ask for a machine for each that was lost since the last call, and has not come back by itself."""
    state = membership.round
    lost = [index for index in state.evicted if index not in state.replaced]
    if not lost:
        return
    membership.publish_round(replaced=state.evicted)
    ranks = {index: entry["node_rank"] for index, entry in membership.entries.items()}
    back = {ranks[index] for index in membership.present()}
    for index in lost:
        if (rank := ranks.get(index)) is not None and rank not in back:
            asked = partial(replace, rank, str(membership.endpoint))
            arguments = (membership.node_name(index), asked)
            threading.Thread(target=_replace, args=arguments, name="replacement", daemon=True).start()


def _replace(name: str, asked: Callable[[], str]) -> None:
    """In a thread, since a scheduler may take its time."""
    try:
        text = f"{name}: {asked()}"
    except LaunchError as error:
        text = f"{name} is not replaced: {error}"
    sys.stderr.write(f"{text}\n")
