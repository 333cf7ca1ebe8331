"""A digest over every step so far: two runs are equal up to the last step at which their chains are equal."""

import hashlib
import math
import struct

LENGTH = 16
"""Hex digits, 64 bits: a million steps collide by chance in one of 10^13 runs."""


def link(chain: str, step: int, *, loss: float, norm: float, rate: float) -> str:
    """Extend the chain by a step: sha256 over the chain, the step number, and loss, gradient norm and learning rate as
    float64.

    All NaNs count as one, since IEEE 754 does not define which an operation returns.
    """
    numbers = [value if value == value else math.nan for value in (loss, norm, rate)]
    return hashlib.sha256(chain.encode() + struct.pack("<q3d", step, *numbers)).hexdigest()[:LENGTH]
