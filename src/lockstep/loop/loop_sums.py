"""Sums of a script's own loop: over its processes, without rounding errors, and over its data."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.numerics.exact_sum import ExactSum, exact_sum
from lockstep.core.numerics.seeds import generators_restored, seed_all, seed_of
from lockstep.data.fingerprint import check_equal, contents_of
from lockstep.data.loader import one_by_one
from lockstep.data.torch_dataset import Samples


def measured(
    micro_batches: Iterable[MicroBatch], measure: Callable[[Any], Mapping[str, Any]]
) -> dict[str, float | int]:
    """Return the sums over all batches of all processes of what `measure` returns. A collective. Raises ModelError."""
    sums: dict[str, ExactSum] = {}
    with generators_restored():
        for micro_batch in micro_batches:
            seed_all(seed_of("evaluation", micro_batch.shard))
            found = measure(micro_batch.batch)
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


def contents(dataset: Any, *, workers: int, warn: Callable[[str], None]) -> dict[str, str]:
    """Return a sum over some samples for the numeric recipe; nothing, after a warning, where they differ each time. A
    collective. Raises DataError where processes have other samples."""
    fetch = partial(one_by_one, workers=workers)
    with generators_restored():
        found = contents_of(Samples(dataset, list, "the data set"), fetch, is_full=False, warn=warn)
    check_equal((len(dataset), found))
    return {} if found is None else {"data.contents": found}
