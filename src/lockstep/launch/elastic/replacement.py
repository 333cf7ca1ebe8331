"""Other machines in the place of lost ones, with live recovery, where a scheduler can start them."""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from lockstep.base.errors import LaunchError
from lockstep.launch.elastic.membership import Membership

REPLACE_SECONDS = 20.0
"""How long a machine that was lost may take to come back by itself, before another one is asked for."""
Replace = Callable[[int, str], str]
"""Has a machine with a node rank started that joins at a rendezvous -> what happens, for the user; or LaunchError."""


class Replacements:
    """Of the machines that a node has seen lost while it led the run."""

    def __init__(self, membership: Membership, replace: Replace) -> None:
        self.membership, self.replace = membership, replace
        self._due: dict[int, float] = {}
        """Lost machine, by index -> when another one is asked for."""

    def look(self) -> None:
        """Ask for other machines where that is due; one that is not needed any more when it comes waits for a loss."""
        membership, now = self.membership, time.monotonic()
        evicted, replaced = membership.round.evicted, membership.round.replaced
        for index in evicted:
            if index not in replaced:
                self._due.setdefault(index, now + REPLACE_SECONDS)
        due = [index for index, at in self._due.items() if now > at and index not in replaced]
        if not due:
            return
        membership.publish_round(replaced=(*replaced, *due))
        entries = dict(membership.entries)
        back = {entries[index]["node_rank"] for index in membership.present() if index in entries}
        for index in due:
            if entries.get(index, {}).get("node_rank") not in {None, *back}:
                rank = membership.section.max_nodes + index  # no other has it: who has the same is taken for lost
                asked = partial(self.replace, rank, str(membership.endpoint))
                arguments = (membership.node_name(index), asked)
                threading.Thread(target=_replace, args=arguments, name="replacement", daemon=True).start()


def _replace(name: str, asked: Callable[[], str]) -> None:
    """In a thread, since a scheduler may take its time."""
    try:
        text = f"{name}: {asked()}"
    except LaunchError as error:
        text = f"{name} is not replaced: {error}"
    sys.stderr.write(f"{text}\n")
