"""The network connections of a process group, which can be shut down to wake everybody who waits in one of them.

A process that waits in a collective of Gloo notices a lost process only where it is connected to it at that moment, and
`ProcessGroup.abort` wakes no thread. Once the connections are shut down, every collective fails at once, and so does
waiting in the store for the address of a process that will not come.
"""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_sockets() -> dict[str, int]:
    """The sockets of this process: inode -> file descriptor."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                found[target] = int(descriptor)
    return found


class GroupConnections:
    """All connections that are opened after it, but for Python's own, which observers and object stores have."""

    def __init__(self) -> None:
        self.spared = set(open_sockets())

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """What is opened inside is not of the group."""
        before = open_sockets().keys()
        yield
        self.spared |= open_sockets().keys() - before

    def shut_down(self) -> None:
        """Shut them down, in any thread. The groups are of no use afterwards, and can be destroyed without waiting."""
        python = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)}
        for inode, descriptor in open_sockets().items():
            if inode not in self.spared and descriptor not in python:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                    if _is_connection(copy):
                        copy.shutdown(socket.SHUT_RDWR)


def _is_connection(copy: socket.socket) -> bool:
    """A listener must stay: Gloo ends the process when it cannot accept."""
    is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
