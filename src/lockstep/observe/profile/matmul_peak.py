"""The floating-point operations per second that this process reaches in matrix products."""

import functools
import time
from collections.abc import Callable

import torch

SIZE = 8192
"""Size of the square matrices on a GPU; a CPU gets smaller ones."""
CPU_SIZE = 1024
SECONDS = 0.3
TOGETHER = 10
"""Products between two waits for a GPU."""


@functools.cache
def peak_flops(precision: str, device: torch.device) -> float:
    """Measure the operations per second of the best of several products, in the precision of the forward pass."""
    operations, seconds = _products(precision, device)
    return operations / min(seconds)


def mean_flops(precision: str, device: torch.device) -> float:
    """Measure the operations per second over all products. On a CPU only the time counts for which this thread has the
    core: other processes on it change nothing."""
    operations, seconds = _products(
        precision, device, clock=time.perf_counter if device.type == "cuda" else time.thread_time
    )
    return operations * len(seconds) / sum(seconds)


def _products(
    precision: str, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, list[float]]:
    """Return the operations of one product, and the seconds of each."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = SIZE if device.type == "cuda" else CPU_SIZE
    a, b = torch.randn(2, size, size, device=device).to(dtype).unbind()
    seconds: list[float] = []
    _ = a @ b
    together = TOGETHER if device.type == "cuda" else 1
    while sum(seconds) < SECONDS:
        _synchronize(device)
        start = clock()
        for _ in range(together):
            _ = a @ b
        _synchronize(device)
        seconds.append((clock() - start) / together)
    return 2 * size**3, seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
