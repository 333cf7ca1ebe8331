"""Clock and memory of a contender: each rank writes a file of what it saw."""

import json
import os
import time
from pathlib import Path

WARM_UP = 3
"""Steps that do not count: allocators, caches and buckets are set up in them."""


class Meter:
    """Call `step` after each optimizer step, and `finish` at the end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = folder / f"rank-{rank}.json"
        self.times: list[float] = []

    def step(self) -> None:
        self.times.append(time.time())

    def finish(self) -> None:
        """Write time of the first step (since $BEGAN), seconds per step after the warm-up, and peak memory in bytes."""
        first = self.times[0] - float(os.environ["BEGAN"])
        seconds = (self.times[-1] - self.times[WARM_UP - 1]) / (len(self.times) - WARM_UP)
        written = {"first_step": first, "seconds_per_step": seconds, "peak_bytes": peak_bytes()}
        self.file.write_text(json.dumps(written), encoding="utf-8")


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not state VmHWM")
