"""Sums over the processes of a script's own loop, without rounding errors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.base.errors import ModelError
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.numerics.exact_sum import ExactSum, exact_sum


def measured(batches: Iterable[Any], measure: Callable[[Any], Mapping[str, Any]]) -> dict[str, float | int]:
    """Return the sums over all batches of all processes of what `measure` returns. A collective. Raises ModelError."""
    sums: dict[str, ExactSum] = {}
    for batch in batches:
        found = measure(batch)
        if not isinstance(found, Mapping):
            raise ModelError(f"measure(batch) returns a dict of numbers, not a {type(found).__name__}")
        for name, values in found.items():
            sums[name] = sums.get(name, ExactSum()) + exact_sum(values)
    return world_sums(sums)


def world_sums(own: Mapping[str, ExactSum]) -> dict[str, float | int]:
    """Return the sums over all processes, each of which may have others. A collective."""
    everyone = all_gather_object(dict(own))
    names = sorted({name for each in everyone for name in each})
    return {name: sum((each.get(name, ExactSum()) for each in everyone), start=ExactSum()).value for name in names}
