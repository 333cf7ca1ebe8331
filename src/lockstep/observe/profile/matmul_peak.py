"""The most floating-point operations per second that this process reaches in a matrix product."""

import time

import torch

SIZE = 2048
"""Of the square matrices on a GPU; a CPU gets smaller ones."""
CPU_SIZE = 1024
SECONDS = 0.3


def peak_flops(precision: str, device: torch.device) -> float:
    """Operations per second of the best of several products, in the precision of the forward pass."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = SIZE if device.type == "cuda" else CPU_SIZE
    a, b = torch.randn(2, size, size, device=device).to(dtype).unbind()
    best, end = float("inf"), time.perf_counter() + SECONDS
    _ = a @ b
    while time.perf_counter() < end:
        _synchronize(device)
        start = time.perf_counter()
        _ = a @ b
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
