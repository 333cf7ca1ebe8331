"""Dropout's random numbers on the CPU in a fifth of the time: four of them from each draw of the generator."""

import warnings

import torch
from torch import Tensor

BITS = 16
LEVELS = 1 << BITS
PER_DRAW = 64 // BITS

_kernels: list[torch.library.Library] = []
"""Keeps the kernel registered."""


def use_fast_bernoulli() -> None:
    """Replace the CPU kernel of `bernoulli_(p)` in this process: dropout of every kind draws with it.

    PyTorch draws a number for each element, which took 10 % of a pass of MiniLM in bf16. A kernel, because modules,
    functions and PyTorch's own attention all call it.
    """
    if _kernels:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is replaced
        library.impl("bernoulli_.float", fast_bernoulli_, "CPU")
    _kernels.append(library)


def fast_bernoulli_(self: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill with 1 with probability p, rounded to a multiple of 2^-16, else with 0. Raises RuntimeError."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    threshold = round(p * LEVELS)
    if threshold == LEVELS:  # beyond int16
        return self.fill_(1)
    numbers = torch.empty(-(-self.numel() // PER_DRAW), dtype=torch.int64)
    numbers.random_(-(2**63), None, generator=generator)
    drawn = numbers.view(torch.int16)[: self.numel()]
    if self.is_contiguous():
        torch.lt(drawn, threshold - LEVELS // 2, out=self.view(-1))
    else:
        self.copy_(torch.lt(drawn, threshold - LEVELS // 2).view(self.shape))
    return self
