"""Clock, memory and, where it is asked for, a profile of a contender: each rank writes a file of what it saw."""

import json
import os
import time
from pathlib import Path

import torch

WARM_UP = 3
"""Steps that do not count: allocators, caches and buckets are set up in them."""
PROFILED = int(os.environ.get("PROFILED", "0"))
"""Last steps, behind those that are timed, for torch's profiler."""


class Meter:
    """Call `step` after each optimizer step, and `finish` at the end. Waits for a GPU at both ends of what is timed."""

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        self.file, self.timed = folder / f"rank-{rank}.json", steps - PROFILED
        self.profiles = PROFILED > 0
        self.times: list[float] = []
        self.profiler = torch.profiler.profile()

    def step(self) -> None:
        done = len(self.times) + 1
        if done in (1, WARM_UP, self.timed) and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.times.append(time.time())
        if done == self.timed:
            self.peaks = {"peak_bytes": peak_bytes(), "gpu_peak_bytes": gpu_peak_bytes()}
            if self.profiles:
                self.profiler.start()

    def finish(self) -> None:
        """Write time of the first step (since $BEGAN), seconds per step after the warm-up, and peak memory in bytes."""
        if self.profiles:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.file.parent / "trace.json.gz"))
        first = self.times[0] - float(os.environ["BEGAN"])
        seconds = (self.times[self.timed - 1] - self.times[WARM_UP - 1]) / (self.timed - WARM_UP)
        written = {"first_step": first, "seconds_per_step": seconds, **self.peaks}
        self.file.write_text(json.dumps(written), encoding="utf-8")


def gpu_peak_bytes() -> int:
    """The largest that tensors have taken on the GPU so far."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not state VmHWM")
