"""Memory that processes hold, have held at most, and can still get: of the host, of a cgroup, of a GPU."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from lockstep.base.lifetime import FORK_SERVER

if sys.platform == "darwin":
    import resource

GB = 10**9
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
"""The files with a cgroup's limit and usage, and the field of memory.stat with reclaimable page cache."""
CGROUP_KILLS = ("memory.oom_control", "memory.events")
"""The files, of version 1 and 2, that count the processes killed in a cgroup."""
SAMPLE_SECONDS = 0.002


def available_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the memory that new processes can have together: what is available on the host, or less where a cgroup of
    this process (of a container or a Slurm job) allows less."""
    return min(psutil.virtual_memory().available, *_left_in_cgroups(proc, cgroups), sys.maxsize)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 when it has ended."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def descendants_bytes(pid: int) -> int:
    """Return the resident memory of all workers below a launcher, and of what they started; each counts the libraries
    that it shares with the process that it was forked from."""
    total = 0
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                total += 0 if child.name() == FORK_SERVER else child.memory_info().rss
    return total


def peak_bytes() -> int:
    """Return the peak resident memory of this process, with Python and all libraries.

    On Linux that is VmHWM. getrusage's ru_maxrss would be wrong there: it survives fork and exec, so it starts at the
    size of the parent, which has torch loaded.
    """
    if (peak := _high_water_mark()) is not None:
        return peak
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))


def device_peak_bytes() -> int:
    """Return the peak memory of tensors on the GPU where this process uses one, else of this process, in bytes."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else peak_bytes()


class Meter:
    """Memory now and its peak since `reset`, in bytes: allocated on a GPU, resident on a CPU.

    Linux tracks the peak itself, and writing 5 to clear_refs resets it (proc(5)). Elsewhere a thread samples every
    2 ms and may miss a shorter peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.process = psutil.Process()
        self._peak = 0
        self._is_tracked = device.type == "cuda" or _reset_high_water_mark()
        if not self._is_tracked:
            threading.Thread(target=self._sample, name="memory", daemon=True).start()

    def now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return int(self.process.memory_info().rss)

    def reset(self) -> int:
        """Restart the peak at the current value, and return it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._is_tracked:
            _reset_high_water_mark()
        self._peak = self.now()
        return self._peak

    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(self._peak, (_high_water_mark() if self._is_tracked else None) or self.now())

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, self.now())
            time.sleep(SAMPLE_SECONDS)


def _high_water_mark() -> int | None:
    """Return VmHWM of this process in bytes; None where the system has none."""
    kilobytes = _field(PROC / "self" / "status", "VmHWM:")
    return None if kilobytes is None else kilobytes * 1024


def _reset_high_water_mark() -> bool:
    """Reset VmHWM of this process -> whether the system could do it."""
    with suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5", encoding="ascii")
        return _high_water_mark() is not None
    return False


def oom_kills() -> int:
    """Count the processes that the kernel has killed because memory ran out: on this machine, and in this cgroup, whose
    kills not every machine counts."""
    in_cgroup = (own / name for own, *_ in _own_cgroups(PROC, CGROUPS) for name in CGROUP_KILLS)
    return sum(_field(file, "oom_kill") or 0 for file in (PROC / "vmstat", *in_cgroup))


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield limit minus usage of each cgroup above this process, reclaimable page cache not counted as used."""
    for own, root, (limit, usage, inactive) in _own_cgroups(proc, cgroups):
        for folder in (each for each in (own, *own.parents) if each.is_relative_to(root)):
            with suppress(OSError, ValueError):  # no such file, or "max"
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                yield max(0, left + (_field(folder / "memory.stat", inactive) or 0))


def _own_cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, Path, tuple[str, str, str]]]:
    """Yield the folder of this process's cgroup, the root above it, and their file names. Inside a container the path
    in /proc may be the host's: then only the root exists, and it is the container's own."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                root, names = (cgroups / "memory", CGROUP_V1) if controllers else (cgroups, CGROUP_V2)
                yield root / path.lstrip("/"), root, names


def _field(file: Path, name: str) -> int | None:
    """Return the number after a name at the start of a line; None when there is none."""
    with suppress(OSError):
        for line in file.read_text(encoding="ascii", errors="replace").splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    return None
