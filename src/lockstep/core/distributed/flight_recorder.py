"""The collectives that a GPU has not finished, from torch's flight recorder: the host may wait for them anywhere."""

import json
import os
from collections.abc import Callable

from torch._C import _distributed_c10d

from lockstep.protocol.environment import FLIGHT_RECORDER_EVENTS

Dump = Callable[..., bytes]
NCCL: Dump | None = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)


def enable(backend: str) -> None:
    """Record the collectives of groups that will be opened, where they run on GPUs: each takes the host 10 us more."""
    if "nccl" in backend:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_RECORDER_EVENTS))


def unfinished(dump: Dump | None = NCCL) -> list[str]:
    """List the first unfinished collective of each group, by name and sequence number, the oldest first."""
    entries = json.loads(dump(onlyActive=True)).get("entries", []) if dump else []
    found: dict[str, str] = {}
    for entry in sorted(entries, key=lambda each: each["record_id"]):
        if not entry["retired"] and entry["state"] != "completed":
            library, _, operation = entry["profiling_name"].partition(":")
            number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            group = entry["process_group"][0]
            found.setdefault(group, f"{library}'s {operation}, number {number} of group {group}")
    return list(found.values())
