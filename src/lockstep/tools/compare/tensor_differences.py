"""How far two tensors differ, in units in the last place (ulps); and which tensors of two checkpoints differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.reader import contents, load

AT_ONCE_BYTES = 256 * 2**20
"""Size of the portions in which both checkpoints are read: they may not fit in memory together."""
GROUPS = ("model.", "ema.", "optimizer.")
"""Prefixes in the order of comparison: a difference in weights explains the others."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Two tensors of one name whose bits differ."""

    name: str
    elements: int
    """Elements with other bits; all where type or shape differ."""
    size: int
    largest: int = 0
    """The largest distance, in ulps for floating-point numbers; 0 where only signs of zeros or payloads of NaNs
    differ."""
    nans: int = 0
    """Elements that are NaN on one side only, which have no distance."""
    unit: str = "ulp"
    kind: str = ""
    """Text, where one side has no such tensor, or one of another type or shape."""

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

    The distance counts steps from one representable number to the next, with +0 and -0 the same, and infinity next to
    the largest number. 0 where either is NaN.
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
    """How two tensors differ; None when all bits are equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (one, other)]
        text = "{} in A, {} in B".format(*kinds)
        return TensorDifference(name=name, elements=one.numel(), size=one.numel(), kind=text)
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


def sort_key(name: str) -> tuple[int, str]:
    """Sort key: weights and buffers, then their moving average, then the optimizer; by name within each."""
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    return group, name


def differences(one: Path, other: Path) -> tuple[int, list[TensorDifference]]:
    """Number of tensors of two verified checkpoints, and those that differ, sorted."""
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
    differing = [*alone, *(each for each in shared if each is not None)]
    return len({*a, *b}), sorted(differing, key=lambda each: sort_key(each.name))


def _portions(a: dict[str, Tensor], b: dict[str, Tensor]) -> Iterator[list[str]]:
    portion, size = [], 0
    for name in sorted(a.keys() & b.keys(), key=sort_key):
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
