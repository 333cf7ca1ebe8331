"""Check that a stream gives the same samples to every process, and whenever it is read."""

from collections.abc import Callable

from lockstep.base.errors import DataError
from lockstep.base.model_contracts import Batch
from lockstep.core.distributed.collectives import all_gather_object, raise_on_all_ranks
from lockstep.core.numerics.digest import digest
from lockstep.data.stream import Stream


def check_stream(stream: Stream, first_samples: Callable[[], Batch]) -> None:
    """Have each rank read the first samples twice. A collective. Raises DataError on all ranks where they differ."""
    found: list[str] = []
    with raise_on_all_ranks():
        for _ in range(2):
            stream.rewind()
            found.append(digest(first_samples()))
    ranks = all_gather_object(found)
    what = None
    if any(first != second for first, second in ranks):
        what = "gives other samples when it is read again"
    elif other := [rank for rank, (first, _) in enumerate(ranks) if first != ranks[0][0]]:
        what = f"gives other samples to rank {other[0]} than to rank 0"
    if what is not None:
        error = DataError(
            f"{stream.where} is a stream that {what}: __iter__ has to begin anew, and give every process all samples "
            "in the same order, which depends on nothing but set_epoch(); Lockstep itself divides them"
        )
        error.is_shared = True
        raise error
