"""How a process on a CPU takes memory: large tensors by themselves, so that what is freed is free."""

import ctypes
import sys
from contextlib import suppress

M_MMAP_THRESHOLD = -3
"""See mallopt(3)."""
LARGE = 4 << 20
"""Bytes from which on a tensor gets pages of its own."""


def return_large_tensors() -> None:
    """Give the memory of large tensors back to the system as soon as they are freed.

    glibc keeps blocks of up to 32 MiB for later, in heaps that break into pieces when blocks of many sizes come and go,
    as with weights that are gathered and dropped: of 0.5 GB needed, 1.8 GB were held. The price are fresh pages. Other
    systems are left as they are.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)
