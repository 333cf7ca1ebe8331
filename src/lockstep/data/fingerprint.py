"""Checksums of the training data, by which a resume detects whether the data has changed since its checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lockstep.base import storage
from lockstep.base.contracts import Source
from lockstep.base.errors import DataError
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.modules.module_trace import fingerprint
from lockstep.data.augment import Augmented
from lockstep.data.dataset import EvenRows, Subset
from lockstep.data.in_memory import Images, Texts
from lockstep.data.mixture import Joined
from lockstep.data.packing import Windows
from lockstep.data.processors import FileSamples
from lockstep.data.token_cache import Tokens

Load = Callable[[Source, Iterable[int]], Iterable[object]]
"""Fetches samples of a source, one by one."""
ROWS = 64
"""Samples, spread evenly, that stand for a source of which not all are in memory."""
AGAIN = 8
"""Samples that are fetched twice: a source that gives others each time has no sum."""


class Unsteady(Exception):
    """A sample differs when it is fetched again."""


def labels_of(source: Source) -> np.ndarray | None:
    """Return the targets of all samples; None where they are not in memory, as of the user's own source."""
    if isinstance(source, Augmented | Tokens):
        return labels_of(source.source)
    if isinstance(source, Subset):
        every = labels_of(source.source)
        return None if every is None else every[source.rows[np.arange(len(source))]]
    if isinstance(source, Joined):
        found = [labels for part in source.parts if (labels := labels_of(part)) is not None]
        return np.concatenate(found) if len(found) == len(source.parts) else None
    return source.labels if isinstance(source, Images | Texts | FileSamples) else None


def contents_of(source: Source, load: Load, *, is_full: bool, warn: Callable[[str], None]) -> str | None:
    """Return a checksum of a source's samples, independent of its files' location and times; None, with a warning,
    where the samples differ each time or the source raises an error.

    It covers all samples in memory or in the token cache, and the sizes of all sounds; of the rest ROWS samples, or all
    if it `is_full`.
    """
    try:
        return fingerprint(list(_parts(source, load, is_full=is_full)))
    except Unsteady:
        what = "the training samples differ each time they are fetched: draw from numpy.random, which is seeded"
    except Exception as error:
        what = f"the training samples could not be fetched for a sum ({type(error).__name__}: {error})".splitlines()[0]
    warn(f"{what}; a resume will not notice where samples have changed")
    return None


def check_equal(found: object) -> None:
    """Raise DataError on all ranks where `found`, sums and classes of the data, differs between them. Collective."""
    ranks = all_gather_object(found)
    if other := [rank for rank, each in enumerate(ranks) if each != ranks[0]]:
        error = DataError(
            f"rank {other[0]} has other training samples than rank 0, or other classes: all processes need the same "
            "data, of which Lockstep gives each its share. Sort what comes out of a set or of a folder, whose order "
            "differs between processes, and draw random numbers from generators with a seed"
        )
        error.is_shared = True
        raise error


def _parts(source: Source, load: Load, *, is_full: bool) -> Iterator[Any]:
    if isinstance(source, Augmented | Subset | Joined):
        for part in source.parts if isinstance(source, Joined) else (source.source,):
            yield from _parts(part, load, is_full=is_full)
        return
    count = len(source) if is_full else min(ROWS, len(source))
    rows, labels = EvenRows(count, len(source))[np.arange(count)].tolist(), labels_of(source)
    tokens = source.tokens if isinstance(source, Windows) else source
    yield labels
    yield tokens.sums if isinstance(tokens, Tokens) else _held(source, rows)
    if labels is None and not isinstance(source, Windows):
        yield _fetched(source, rows, load)


def _held(source: Source, rows: list[int]) -> Any:
    """Return what is known of samples without fetching them."""
    if isinstance(source, Images):
        return source.images
    if isinstance(source, Texts):
        return source.texts if isinstance(source.texts, list) else [source.texts[row] for row in rows]
    if isinstance(source, FileSamples):
        sizes = np.array([path.stat().st_size if path.exists() else -1 for path in source.paths])
        return [sizes, [storage.sha256(path) if (path := source.paths[row]).is_file() else None for row in rows]]
    return None


def _fetched(source: Source, rows: list[int], load: Load) -> str:
    again = rows[:AGAIN]
    found = map(fingerprint, load(source, [*rows, *again]))
    first = [*islice(found, len(again))]
    total = fingerprint(first)
    for each in islice(found, len(rows) - len(again)):
        total = fingerprint([total, each])
    if [*found] != first:
        raise Unsteady
    return total
