"""What ranks can tell each other while all of them hang in a collective: notes on the rendezvous' own store."""

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PREFIX = "lockstep"
PATIENCE = timedelta(seconds=10)
"""How long one note may take to travel; a store that takes longer counts as gone."""


class StoreNotes:
    """Notes by rank on a store; for one thread, over a connection of its own.

    Every method raises dist.DistError when the store is gone.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store.set_timeout(PATIENCE)

    def write(self, what: str, value: Any) -> None:
        self.store.set(f"{PREFIX}/{what}/{self.rank}", json.dumps(value))

    def read(self, what: str, ranks: list[int]) -> dict[int, Any]:
        """The notes of these ranks, as far as they have left one."""
        keys = {rank: f"{PREFIX}/{what}/{rank}" for rank in ranks}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        if not there:
            return {}
        return {r: json.loads(text) for r, text in zip(there, self.store.multi_get(list(there.values())), strict=True)}

    def count(self, what: str, more: int = 0) -> int:
        """A number that all share, after adding to it."""
        return int(self.store.add(f"{PREFIX}/{what}", more))
