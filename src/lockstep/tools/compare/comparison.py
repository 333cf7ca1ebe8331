"""Compares two runs, or two checkpoints, bit by bit; if they differ, finds where they diverge and possible causes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import layout, verify
from lockstep.checkpoint.reader import contents, load
from lockstep.tools.compare.run_evidence import DIGESTS, EVALUATION, LOGGED, Evidence, evidence

QUANTITIES = (*LOGGED, *DIGESTS)
"""Quantities in the order of comparison: a cause comes before its effects; evaluations follow."""
EARLY = "stopped early"
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
    """Number of elements with other bits; all where type or shape differ."""
    size: int
    largest: int = 0
    """The largest distance, in ulps for floats; 0 where only signs of zeros or payloads of NaNs differ."""
    nans: int = 0
    """Number of elements that are NaN on one side only, which have no distance."""
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
    """Return the distance of two floating-point tensors of one type and shape, per element, as uint64 [elements].

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
    """Return how two tensors differ; None when all bits are equal."""
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
    """Return a sort key: weights and buffers, then their moving average, then the optimizer; by name within each."""
    group = next((i for i, prefix in enumerate(GROUPS) if name.startswith(prefix)), len(GROUPS))
    return group, name


def differences(one: Path, other: Path) -> tuple[int, list[TensorDifference]]:
    """Return the number of tensors of two verified checkpoints, and those that differ, sorted."""
    a, b = contents(one), contents(other)
    one_sided = [
        TensorDifference(name=name, elements=t.numel(), size=t.numel(), kind=f"only in {side}")
        for side, mine, its in (("A", a, b), ("B", b, a))
        for name, t in mine.items()
        if name not in its
    ]
    shared = (difference(*each) for each in _read_shared(one, other, (a, b)))
    differing = [*one_sided, *(each for each in shared if each is not None)]
    return len({*a, *b}), sorted(differing, key=lambda each: sort_key(each.name))


def _read_shared(
    one: Path, other: Path, kinds: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor, other tensor) of each name that both have, read in portions of AT_ONCE_BYTES."""
    a, b = kinds
    names = sorted(a.keys() & b.keys(), key=sort_key)
    ends = accumulate(a[name].nbytes + b[name].nbytes for name in names)
    for _, portion in groupby(zip(names, ends, strict=True), key=lambda each: each[1] // AT_ONCE_BYTES):
        x = {name: torch.empty_like(a[name], device="cpu") for name, _ in portion}
        y = {name: torch.empty_like(b[name], device="cpu") for name in x}
        load(one, x)
        load(other, y)
        yield from ((name, x[name], y[name]) for name in x)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    is_equal: bool
    """Whether loss, gradient norm, learning rate, chain, digests, evaluations and tensors are the same, as far as both
    have them, and neither was stopped early where the other was not."""
    lines: list[str]


def compare(path: Path, other: Path) -> Comparison:
    """Compare two runs or two checkpoints, as far as both go. Raises ConfigError when one of them is neither,
    CheckpointError when they have no step in common."""
    a, b = evidence(path), evidence(other)
    common = [step for step in a.facts if _shared(a, b, step)]
    if not common:
        raise CheckpointError(
            f"{a.name} and {b.name} have no step in common that both have logged or saved: nothing to compare "
            f"({'; '.join([f'{_steps(a)} and {_steps(b)}', *a.notes, *b.notes])})"
        )
    first = next((step for step in common if _differing(a, b, step)), None)
    last = max(common)
    notes = [*a.notes, *b.notes]
    pair = _pair(a, b, notes)
    number, tensors = differences(a.checkpoints[pair], b.checkpoints[pair]) if pair else (0, [])
    lines = [f"A: {a.name}, {_steps(a)}", f"B: {b.name}, {_steps(b)}"]
    ends = _different_ends(a, b)
    if is_equal := first is None and not tensors and not ends:
        lines.append(_equal_line(a, b, last))
    else:
        lines += [*(_first_difference(a, b, common=common, first=first) if first or tensors else ()), *ends]
    unknown = ["there is no checkpoint of a step that both have kept whole: no tensors were compared"]
    lines += _tensors(pair, number, tensors) if pair else unknown
    lines += [*_settings(a, b), *(f"note: {note}" for note in notes)]
    return Comparison(is_equal=is_equal, lines=lines)


def _steps(side: Evidence) -> str:
    return f"{side.last:,} step{'s' if side.last != 1 else ''}"


def _shared(a: Evidence, b: Evidence, step: int) -> list[str]:
    """Return the quantities of a step that both sides have."""
    measured = sorted(name for name in a.facts[step] if name.startswith(EVALUATION))
    return [name for name in (*QUANTITIES, *measured) if name in a.facts[step] and name in b.facts.get(step, {})]


def _differing(a: Evidence, b: Evidence, step: int) -> list[str]:
    return [name for name in _shared(a, b, step) if a.facts[step][name] != b.facts[step][name]]


def _different_ends(a: Evidence, b: Evidence) -> list[str]:
    """Return a line if one run was stopped early and the other was not; none if the other has not got that far."""
    for name, side, other_name, other in (("A", a, "B", b), ("B", b, "A", a)):
        if side.end != EARLY or (other.end == EARLY and other.last == side.last):
            continue
        if other.last > side.last or (other.last == side.last and other.end is not None):
            how = f"{other.end} after step {other.last:,}" if other.end else f"went on to step {other.last:,}"
            return [f"different ends: {name} was stopped early after step {side.last:,}, {other_name} {how}"]
    return []


def _pair(a: Evidence, b: Evidence, notes: list[str]) -> int | None:
    """Choose the step to compare tensors of: the earliest whose digests differ, else the last; both must be whole."""
    steps = [step for step in a.facts if step in a.checkpoints and step in b.checkpoints]
    differing = [step for step in steps if "digest" in _differing(a, b, step)]
    for step in differing + [step for step in reversed(steps) if step not in differing]:
        problems = [(side.checkpoints[step], verify.problem(side.checkpoints[step])) for side in (a, b)]
        damaged = [f"passed over {folder}: {problem}" for folder, problem in problems if problem]
        if not damaged:
            return step
        notes += damaged
    return None


def _equal_line(a: Evidence, b: Evidence, last: int) -> str:
    known = [f"{name} {a.facts[last][name][:16]}" for name in ("chain", "digest") if name in _shared(a, b, last)]
    what = " · ".join([f"{last:,} steps", *known])
    if a.last == b.last == last:
        return f"equal: {what}"
    ends = [
        f"{name} ends there" if side.last == last else f"{name} goes on to step {side.last:,}"
        for name, side in (("A", a), ("B", b))
    ]
    return f"equal so far, not to the end of both: {what}; {', '.join(ends)}"


def _first_difference(a: Evidence, b: Evidence, *, common: list[int], first: int | None) -> Iterator[str]:
    if first is None:
        yield f"different, although all that was logged up to step {max(common):,} is equal"
        return
    before = max((step for step in common if step < first), default=0)
    where = f"after step {before:,} was equal" if before else "the first that can be compared"
    yield f"different: at step {first:,}, {where}"
    differing = _differing(a, b, first)
    for name in differing:
        yield f"  {name.replace('_', ' ')}: {_value(a, first, name)} in A, {_value(b, first, name)} in B"
    knows_weights = not {"chain", "digest"}.isdisjoint(_shared(a, b, first))
    is_evaluation = knows_weights and all(name.startswith(EVALUATION) for name in differing)
    if first - before > 1 and not is_evaluation:
        yield f"  they diverge in one of steps {before + 1:,} to {first:,}; observe.log_every=1 would tell in which"


def _value(side: Evidence, step: int, name: str) -> Any:
    value = side.facts[step][name]
    return "NaN or infinite" if value is None else value[:16] if isinstance(value, str) else repr(value)


def _tensors(step: int, number: int, differing: list[TensorDifference]) -> Iterator[str]:
    if not differing:
        yield f"all {number} tensors of step {step:,} are equal"
        return
    elements = sum(d.elements for d in differing)
    yield f"tensors of step {step:,}: {len(differing)} of {number} differ, in {elements:,} elements"
    yield f"  the first is {differing[0].name}: {differing[0]}"
    most = max((d for d in differing if d.unit and not d.kind), key=lambda d: d.largest, default=differing[0])
    if most is not differing[0]:
        yield f"  the largest difference is in {most.name}: {most}"


def _settings(a: Evidence, b: Evidence) -> Iterator[str]:
    """Describe the settings of the recipes that differ: first those that may change bits, then the others."""
    numeric = {*a.numeric, *b.numeric}
    sides = [
        {**side.settings, **side.numeric} if a.numeric and b.numeric else side.settings
        for side in (a, b)
        if a.settings and b.settings
    ] or [a.numeric, b.numeric]
    found = layout.differences(*sides) if all(sides) else []
    if found:
        yield "recipes:"
    kinds = {name.removesuffix("kind") for name, *_ in found if name.endswith(".kind")}
    for name, one, other in sorted(found, key=lambda field: field[0] not in numeric):
        if not all(name in side for side in sides) and name.startswith(tuple(kinds)):
            continue  # only one of two kinds has such a setting
        mark = " (incidental)" if numeric and name not in numeric else ""
        yield f"  {name}: {one!r} in A, {other!r} in B{mark}"
