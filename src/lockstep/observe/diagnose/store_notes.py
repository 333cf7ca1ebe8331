"""Messages between ranks through the rendezvous store, which work while all of them hang in a collective."""

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PREFIX = "lockstep"
PATIENCE = timedelta(seconds=10)
"""Timeout of a note; a store that takes longer counts as lost."""


class StoreNotes:
    """Notes by rank in the store, on a connection of its own, for one thread. Methods raise DistError if it is lost."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store.set_timeout(PATIENCE)

    def write(self, what: str, value: Any) -> None:
        self.store.set(f"{PREFIX}/{what}/{self.rank}", json.dumps(value))

    def read(self, what: str, ranks: list[int]) -> dict[int, Any]:
        """Return rank -> its note, for those of the ranks that have written one."""
        keys = {rank: f"{PREFIX}/{what}/{rank}" for rank in ranks}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        if not there:
            return {}
        return {r: json.loads(text) for r, text in zip(there, self.store.multi_get(list(there.values())), strict=True)}

    def count(self, what: str, more: int = 0) -> int:
        """Add `more` to a counter shared by all ranks; return its value."""
        return int(self.store.add(f"{PREFIX}/{what}", more))
