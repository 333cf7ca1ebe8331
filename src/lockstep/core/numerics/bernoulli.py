"""Dropout's random numbers on the CPU in a fifth of the time: four of them from each draw of the generator."""

import warnings

import torch
from torch import Tensor

BITS = 16
LEVELS = 1 << BITS
PER_DRAW = 64 // BITS
TOLERANCE = 1e-3
"""By how much rounding may change a probability, or that of the opposite."""

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
    """Fill with 1 with probability p, else with 0; any shape, in place.

    p is rounded to a multiple of 2^-16, unless that changes p or 1 - p by more than TOLERANCE. Raises RuntimeError
    for p outside 0..1.
    """
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    if p == 1:  # beyond the integers' range
        return self.fill_(1)
    is_coarse = abs(round(p * LEVELS) / LEVELS - p) <= TOLERANCE * min(p, 1 - p)
    numbers = torch.empty(-(-self.numel() // PER_DRAW) if is_coarse else self.numel(), dtype=torch.int64)
    numbers.random_(-(2**63), None, generator=generator)
    drawn = numbers.view(torch.int16)[: self.numel()] if is_coarse else numbers
    levels = LEVELS if is_coarse else 1 << 64
    threshold = round(p * levels) - levels // 2
    if self.is_contiguous():
        torch.lt(drawn, threshold, out=self.view(-1))
    else:
        self.copy_(torch.lt(drawn, threshold).view(self.shape))
    return self
