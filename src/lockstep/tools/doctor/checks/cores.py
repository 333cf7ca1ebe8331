"""Cores, threads, and limits on both."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from lockstep.base.world import cores
from lockstep.launch.launch_config import MAX_PER_CORE
from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext

SCOPE = "machine"
CGROUP = Path("/sys/fs/cgroup/cpu.stat")
BUSY = 0.5
BUSY_SECONDS = 0.5


def check(context: DoctorContext, *, cgroup: Path = CGROUP) -> Iterator[Diagnosis]:
    threads = context.recipe.run.threads
    if threads * context.processes > cores():
        yield Diagnosis(
            code="LS-CPU-01",
            severity="error" if max(context.processes, threads) > MAX_PER_CORE * cores() else "warning",
            cause=f"{context.processes} processes with {threads} threads each share {cores()} cores",
            repair=f"set launch.processes={max(1, cores() // threads)}, or fewer run.threads",
        )
    throttled = _throttled_seconds(cgroup)
    if throttled > 0:
        yield Diagnosis.warning(
            "LS-CPU-02",
            f"the container's CPU limit has stopped its processes for {throttled:.0f} s so far",
            "raise the CPU limit, or run fewer processes and threads",
        )
    busy = psutil.cpu_percent(interval=BUSY_SECONDS) / 100
    if busy > BUSY:
        yield Diagnosis.note(
            "LS-CPU-03",
            f"other processes use {busy:.0%} of this machine's cores now",
            "look at `top`: they make steps slower, and measurements worthless",
        )


def _throttled_seconds(file: Path) -> float:
    """Return the seconds of throttling so far; 0 where there is no limit."""
    try:
        fields = dict(line.split() for line in file.read_text().splitlines() if len(line.split()) == 2)
        return int(fields.get("throttled_usec", 0)) / 1e6
    except (OSError, ValueError):
        return 0.0
