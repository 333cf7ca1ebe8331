"""The floating-point operations per second that this process reaches in matrix products, and in which precision."""

import functools
import time
from collections.abc import Callable

import torch

from lockstep.core.host.stream_clock import synchronize

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZE = 8192
"""Size of the square matrices on a GPU; a CPU gets smaller ones."""
CPU_SIZE = 1024
SECONDS = 0.3
TOGETHER = 10
"""Products between two waits for a GPU."""
COMPARED_SIZE, COMPARED_TIMES = 512, 3
"""Size and number of the products that compare two precisions: together about 20 ms on one core."""
FINE_SECONDS = 1e-5
MANY_PARAMETERS = 500_000
"""Fewest parameters of a model for which precisions are compared: steps of small ones are mostly other work."""
FASTER = {"fp32": ("bf16", 1.5), "bf16": ("fp32", 1.15), "fp16": ("fp32", 1.15)}
"""Precision -> the other that is compared, and the ratio of their speeds from which the other is worth a change: a step
gains less than its products, since autocast converts weights and activations."""


@functools.cache
def peak_flops(precision: str, device: torch.device) -> float:
    """Measure the operations per second of the best of several products, in the precision of the forward pass."""
    operations, seconds = _products(precision, device)
    return operations / min(seconds)


def mean_flops(precision: str, device: torch.device) -> float:
    """Measure the operations per second over all products; on a CPU in the time that this thread has the core."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    operations, seconds = _products(precision, device, clock=clock)
    return operations * len(seconds) / sum(seconds)


def compare_precisions(precision: str) -> tuple[str, float]:
    """Return the precision to compare with on a CPU, and how many times as fast its products are on this thread's core.

    What other processes do on the core does not count, where the clock of threads is fine; nothing random is drawn.
    """
    is_fine = time.get_clock_info("thread_time").resolution < FINE_SECONDS
    clock = time.thread_time if is_fine else time.perf_counter

    def seconds(kind: str) -> float:
        matrix = torch.full((COMPARED_SIZE, COMPARED_SIZE), 0.5, dtype=DTYPES.get(kind, torch.float32))
        times = []
        for _ in range(1 + COMPARED_TIMES):  # the first prepares the kernel
            start = clock()
            _ = matrix @ matrix
            times.append(clock() - start)
        return max(min(times[1:]), FINE_SECONDS)

    other = FASTER[precision][0]
    return other, seconds(precision) / seconds(other)


def faster_precision(precision: str, device: torch.device, *, parameters: int) -> str:
    """Return a sentence on a precision with much faster products here; empty without one, or for a small model."""
    if device.type != "cpu" or parameters < MANY_PARAMETERS or precision not in FASTER:
        return ""
    other, factor = compare_precisions(precision)
    if factor < FASTER[precision][1]:
        return ""
    what = f"matrix products in {other} are {factor:.1f} times as fast as in {precision} on this processor"
    return f"{what}: train.precision={other} shortens steps, and gives other weights"


def _products(
    precision: str, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, list[float]]:
    """Return the operations of one product, and the seconds of each."""
    dtype = DTYPES.get(precision, torch.float32)
    size = SIZE if device.type == "cuda" else CPU_SIZE
    a, b = torch.randn(2, size, size, device=device).to(dtype).unbind()
    seconds: list[float] = []
    _ = a @ b
    together = TOGETHER if device.type == "cuda" else 1
    while sum(seconds) < SECONDS:
        synchronize(device)
        start = clock()
        for _ in range(together):
            _ = a @ b
        synchronize(device)
        seconds.append((clock() - start) / together)
    return 2 * size**3, seconds
