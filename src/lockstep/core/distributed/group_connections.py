"""The network connections of process groups, which can be shut down to wake every thread that waits in one of them.

A process that waits in a collective of Gloo notices a lost process only where it is connected to it at that moment, and
`ProcessGroup.abort` wakes no thread. Once the connections are shut down, every collective fails at once.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

import torch
import torch.distributed as dist

DESCRIPTORS = "/proc/self/fd"


def shut_down_connections() -> None:
    """Shut down the connections of all Gloo groups of this process, in any thread; nothing waits in them any more."""
    for each in _sockets():
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # Gloo ends the process when it cannot accept
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def abort_nccl() -> None:
    """Abort this process's NCCL groups, in any thread; their GPUs go on without an error, with invalid results."""
    for group in reversed(list(dist.distributed_c10d._world.pg_map)) if dist.is_nccl_available() else ():
        with suppress(RuntimeError):  # it has none for GPUs, or was aborted by another thread
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                backend.abort()


def listening_ports() -> list[int]:
    """List the ports of this process at which Gloo groups accept connections."""
    return sorted(
        each.getsockname()[1] for each in _sockets() if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _sockets() -> Iterator[socket.socket]:
    """Yield copies of Gloo's sockets, one at a time. They are those that C++ has opened without close-on-exec; Python
    opens none such, nor does torch's TCPStore. The first three descriptors are inherited."""
    for descriptor in map(int, os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ()):
        with suppress(OSError):
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode) and os.get_inheritable(descriptor):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield copy
