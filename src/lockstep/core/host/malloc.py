"""How a process on a CPU gets memory and gives it back, under glibc; other systems are left as they are."""

import ctypes
import sys
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""See mallopt(3)."""
LARGE = 4 << 20
"""Bytes from which on a tensor gets pages of its own."""
LARGEST = 32 << 20
"""The most that glibc takes for that."""
ALL = 2**31 - 1
"""More bytes at the top of a heap than there will be."""


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors for the next ones, of all up to 32 MiB.

    A step frees what the next one needs again. glibc gives it back to the system meanwhile, and fresh pages cost
    time: the MNIST CNN's steps took 1.0 to 1.3 times as long, with 20,000 new pages each.
    """
    _tell(M_MMAP_THRESHOLD, LARGEST)
    _tell(M_TRIM_THRESHOLD, ALL)


def return_large_tensors() -> None:
    """Give the memory of large tensors back to the system as soon as they are freed.

    glibc keeps blocks of up to 32 MiB for later, in heaps that break into pieces when blocks of many sizes come and go,
    as with weights that are gathered and dropped: of 0.5 GB needed, 1.8 GB were held. The price are fresh pages.
    """
    _tell(M_MMAP_THRESHOLD, LARGE)


def _tell(parameter: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(parameter, value)
