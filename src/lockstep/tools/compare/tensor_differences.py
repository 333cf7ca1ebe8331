"""How far two tensors are apart, in units of the last place; and where two checkpoints differ first."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.reader import contents, load

AT_ONCE_BYTES = 256 * 2**20
"""Tensors are read from both checkpoints in portions of about so much: a whole one may not fit in memory twice."""
GROUPS = ("model.", "ema.", "optimizer.")
"""What stands first in a checkpoint is compared first: weights differ before what follows from them matters."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Two tensors of one name whose bits differ."""

    name: str
    elements: int
    """How many elements have other bits; all where the tensors are of another kind."""
    size: int
    largest: int = 0
    """The largest distance: in ulps for floating-point numbers, else the plain difference. 0 where only the signs of
    zeros, or NaNs of several kinds, differ."""
    nans: int = 0
    """Elements that are NaN on one side only; they have no distance."""
    unit: str = "ulp"
    kind: str = ""
    """In words, where one side has no such tensor, or one of another type or shape."""

    def __str__(self) -> str:
        if self.kind:
            return self.kind
        far = f"{self.largest:,} {self.unit}{'s' if self.unit and self.largest != 1 else ''}".rstrip()
        text = f"{self.elements:,} of {self.size:,} elements differ, by {'at most ' * (self.elements > 1)}{far}"
        if self.nans:
            text += f"; {self.nans:,} of them are NaN on one side only"
        elif not self.largest:
            text += " (other bits of the same value: +0 and -0, or NaNs of two kinds)"
        return text


def ulps(one: Tensor, other: Tensor) -> np.ndarray:
    """Distance of two floating-point tensors of one type and shape, per element, as uint64 [elements].

    That is how many steps from a number to its neighbour lead from one to the other: 1 for neighbours, also across
    zero, where +0 and -0 are the same place; infinity is the neighbour of the largest number. 0 where any is NaN.
    """
    kind = BITS[one.element_size()]
    lowest = torch.iinfo(kind).min
    a, b = (tensor.detach().cpu().contiguous().flatten().view(kind).numpy() for tensor in (one, other))
    is_nan = (one.isnan() | other.isnan()).cpu().flatten().numpy()
    # sign and magnitude: of one sign, magnitudes are subtracted, of two they are added; uint64 holds both for float64
    x, y = ((bits & ~np.asarray(lowest, bits.dtype)).astype(np.uint64) for bits in (a, b))
    distance = np.where((a < 0) == (b < 0), np.maximum(x, y) - np.minimum(x, y), x + y)
    return np.where(is_nan, np.uint64(0), distance)


def difference(name: str, one: Tensor, other: Tensor) -> TensorDifference | None:
    """How two tensors differ; None when every bit is the same."""
    if one.dtype != other.dtype or one.shape != other.shape:
        kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (one, other)]
        kind_words = "{} in A, {} in B".format(*kinds)
        return TensorDifference(name=name, elements=one.numel(), size=one.numel(), kind=kind_words)
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    kind = BITS[a.element_size()]
    bits = (a.contiguous().flatten().view(kind) != b.contiguous().flatten().view(kind)).numpy()
    if not bits.any():
        return None
    if a.is_floating_point():
        distance, unit = ulps(a, b), "ulp"
        nans = int((a.isnan() != b.isnan()).sum())
    else:
        x, y = a.flatten().numpy(), b.flatten().numpy()
        distance = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)  # modulo 2^64: exact
        unit, nans = "", 0
    largest = int(distance.max())
    return TensorDifference(name=name, elements=int(bits.sum()), size=bits.size, largest=largest, nans=nans, unit=unit)


def order(name: str) -> tuple[int, str]:
    """Weights and buffers first, then their moving average, then the optimizer; by name inside each."""
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    return group, name


def differences(one: Path, other: Path) -> tuple[int, list[TensorDifference]]:
    """(number of tensors, those that differ, in order) of two checkpoints that have been verified."""
    a, b = contents(one), contents(other)
    alone = [
        TensorDifference(name=name, elements=t.numel(), size=t.numel(), kind=f"only in {side}")
        for side, mine, its in (("A", a, b), ("B", b, a))
        for name, t in mine.items()
        if name not in its
    ]
    shared = [
        difference(name, *pair) for names in _portions(a, b) for name, *pair in _read(names, (one, a), (other, b))
    ]
    found = [*alone, *(each for each in shared if each is not None)]
    return len({*a, *b}), sorted(found, key=lambda each: order(each.name))


def _portions(a: dict[str, Tensor], b: dict[str, Tensor]) -> Iterator[list[str]]:
    portion, size = [], 0
    for name in sorted(a.keys() & b.keys(), key=order):
        portion.append(name)
        size += a[name].nbytes + b[name].nbytes
        if size >= AT_ONCE_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _read(names: list[str], *sides: tuple[Path, dict[str, Tensor]]) -> Iterator[tuple[Any, ...]]:
    """(name, tensor, other tensor) of each name."""
    filled = []
    for folder, kinds in sides:
        tensors = {name: torch.empty_like(kinds[name], device="cpu") for name in names}
        load(folder, tensors)
        filled.append(tensors)
    for name in names:
        yield (name, *(tensors[name] for tensors in filled))
