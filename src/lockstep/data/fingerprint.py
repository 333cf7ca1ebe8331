"""Sums over what training learns from, by which a resume sees whether the data has changed since its checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lockstep.base import storage
from lockstep.base.contracts import Source
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


def labels_of(source: Source) -> np.ndarray | None:
    """The targets of all samples; None where they are not in memory, as of the user's own source."""
    if isinstance(source, Augmented | Subset | Tokens):
        return labels_of(source.source)
    if isinstance(source, Joined):
        found = [labels for part in source.parts if (labels := labels_of(part)) is not None]
        return np.concatenate(found) if len(found) == len(source.parts) else None
    return source.labels if isinstance(source, Images | Texts | FileSamples) else None


def contents_of(source: Source, load: Load, *, is_full: bool) -> str | None:
    """A sum over the samples of a source, the same wherever its files lie and whatever their times are; None where the
    samples are others each time, or an error of the source stands in the way, which training will meet, too.

    All count that are in memory or in the token cache, and the sizes of all sounds; of the rest ROWS samples do, or all
    if it `is_full`.
    """
    try:
        return fingerprint(list(_parts(source, load, is_full=is_full)))
    except Exception:
        return None


def _parts(source: Source, load: Load, *, is_full: bool) -> Iterator[Any]:
    if isinstance(source, Augmented | Subset):
        yield from _parts(source.source, load, is_full=is_full)
        return
    if isinstance(source, Joined):
        for part in source.parts:
            yield from _parts(part, load, is_full=is_full)
        return
    count = len(source) if is_full else min(ROWS, len(source))
    rows, labels = EvenRows(count, len(source))[np.arange(count)].tolist(), labels_of(source)
    if isinstance(source, Windows):
        yield source.tokens.sums
    elif labels is None:
        yield source.sums if isinstance(source, Tokens) else None
        yield _fetched(source, rows, load)
    else:
        yield labels
        if isinstance(source, Tokens):
            yield source.sums
        elif isinstance(source, Images):
            yield source.images
        elif isinstance(source, Texts):
            yield source.texts if isinstance(source.texts, list) else [source.texts[row] for row in rows]
        elif isinstance(source, FileSamples):
            yield np.array([path.stat().st_size if path.exists() else -1 for path in source.paths])
            yield [storage.sha256(path) if (path := source.paths[row]).is_file() else None for row in rows]


def _fetched(source: Source, rows: list[int], load: Load) -> str:
    again = rows[:AGAIN]
    found = map(fingerprint, load(source, [*rows, *again]))
    first = [*islice(found, len(again))]
    total = fingerprint(first)
    for each in islice(found, len(rows) - len(again)):
        total = fingerprint([total, each])
    if [*found] != first:
        raise ValueError("a sample is another one when it is fetched again")
    return total
