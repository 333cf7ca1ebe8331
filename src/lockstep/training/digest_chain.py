"""One line that stands for every step so far: two runs have been the same up to where their chains are."""

import hashlib
import math
import struct

LENGTH = 16
"""Hex digits of a chain: 64 bits, so that a million steps meet by chance once in 10^13 runs."""


def link(chain: str, step: int, *, loss: float, norm: float, rate: float) -> str:
    """The chain after one more step: sha256 over the chain before it, the step's number, and the raw bits (float64) of
    loss, gradient norm and learning rate.

    IEEE 754 leaves open which of its many NaNs an operation gives, so that all count as one.
    """
    numbers = [value if value == value else math.nan for value in (loss, norm, rate)]
    return hashlib.sha256(chain.encode() + struct.pack("<q3d", step, *numbers)).hexdigest()[:LENGTH]
