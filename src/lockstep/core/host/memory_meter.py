"""How much memory this process holds, and the most it has held since it was last asked to forget."""

import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LOOK_SECONDS = 0.002


class Meter:
    """Bytes: on a GPU those of its allocator, on a CPU the process's resident set.

    Linux keeps the highest resident set itself, and `5` in clear_refs makes it start anew (proc(5)). Elsewhere a thread
    looks every 2 ms, which may miss a peak that is shorter.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.process = psutil.Process()
        self._is_kept = device.type == "cuda" or self._forgets()
        self._highest = 0
        if not self._is_kept:
            threading.Thread(target=self._look, name="memory", daemon=True).start()

    def now(self) -> int:
        """Bytes at this moment."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return int(self.process.memory_info().rss)

    def forget(self) -> int:
        """Let the peak begin at what is held now, which is returned."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._is_kept:
            self._forgets()
        self._highest = self.now()
        return self._highest

    def peak(self) -> int:
        """The most bytes since `forget`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if self._is_kept:
            line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            return max(self._highest, int(line.split()[1]) * 1024)
        return max(self._highest, self.now())

    def _forgets(self) -> bool:
        with suppress(OSError):
            FORGET.write_text("5")
            return "VmHWM" in STATUS.read_text()
        return False

    def _look(self) -> None:
        while True:
            self._highest = max(self._highest, self.now())
            time.sleep(LOOK_SECONDS)
