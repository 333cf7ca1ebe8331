"""How much memory processes can still have here, and how much this one has had."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

if sys.platform == "darwin":
    import resource

GB = 10**9
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""Of a control group: the file with its limit, the one with its use, and what memory.stat calls pages of files that
the kernel takes back when others need them."""


def available(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that processes which start now can have together: what the machine has left, or less where a control
    group of this process (of a container, of a Slurm job) allows less."""
    return min(psutil.virtual_memory().available, *_left_in_groups(proc, cgroups), sys.maxsize)


def peak_bytes() -> int:
    """The most memory this process has held at once, with Python and all libraries.

    On Linux that is VmHWM of /proc/self/status. getrusage's number would be of no use: it outlives fork and exec, and
    so begins at the size of the parent, which has torch loaded.
    """
    with suppress(OSError):
        for line in (PROC / "self" / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))


def held_bytes(pid: int) -> int:
    """What a process holds now; 0 when it has gone."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def be_the_first_to_go() -> None:
    """When memory runs short, the kernel shall end this process rather than another one."""
    with suppress(OSError):
        (PROC / "self" / "oom_score_adj").write_text("1000", encoding="ascii")


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group above this process leaves: its limit less its use."""
    for folder, (limit, use, inactive) in _groups(proc, cgroups):
        with suppress(OSError, ValueError):  # not there, or "max"
            left = _number(folder / limit) - _number(folder / use)
            yield max(0, left + _counted(folder / "memory.stat", inactive))


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's own group and of those above, of version 1 and 2. Inside a container the path in
    /proc may be the host's: then only the root is there, and it is the container's own."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, names = (cgroups / "memory", VERSION_1) if controllers else (cgroups, VERSION_2)
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                yield folder, names
                if folder == root:
                    break


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))


def _counted(file: Path, name: str) -> int:
    """The number behind a name in memory.stat; 0 when it is not there."""
    with suppress(OSError):
        for line in file.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
