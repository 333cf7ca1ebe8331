"""Limits of the system: shared memory, open files."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext

SCOPE = "machine"
LEAST_SHARED = 256 << 20
LEAST_FILES = 1024
LEAST_MEMORY = 1 << 30
"""Bytes per process: PyTorch and its imports take half of them."""


def check(context: DoctorContext, *, shared: Path = Path("/dev/shm")) -> Iterator[Diagnosis]:
    from lockstep.core.host.memory_meter import available_bytes  # noqa: PLC0415 (torch)

    if sys.platform == "linux" and shared.is_dir() and shutil.disk_usage(shared).free < LEAST_SHARED:
        yield Diagnosis.warning(
            "LS-SYS-01",
            f"{shared} has {shutil.disk_usage(shared).free >> 20} MiB free: loaders and the exchange need it",
            "start the container with --shm-size=1g (Kubernetes: an emptyDir with medium: Memory)",
        )
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 (Windows has none)

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files < LEAST_FILES:
            yield Diagnosis.warning(
                "LS-SYS-02",
                f"a process may have {files} files open (ulimit -n)",
                f"ulimit -n {16 * LEAST_FILES}, or the limit of the service or the container",
            )
    available = available_bytes()
    if available < LEAST_MEMORY * context.processes:
        yield Diagnosis.error(
            "LS-SYS-03",
            f"{available >> 20} MiB of memory are available to {context.processes} processes",
            "run fewer processes, end others, or raise the container's limit; see `lockstep estimate`",
        )
