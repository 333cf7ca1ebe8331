"""Opens a split: finds its source, caps it, turns texts into tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.base import plugins
from lockstep.base.contracts import Columns, Source, Tokenizer
from lockstep.base.errors import DataError
from lockstep.base.events import Preparing
from lockstep.data.augment import Augmented
from lockstep.data.data_config import DataSection
from lockstep.data.token_cache import tokenised


class EvenRows:
    """The positions of `count` samples, spread evenly over `whole`, as an array that takes no memory."""

    def __init__(self, count: int, whole: int) -> None:
        self.count, self.whole = count, whole

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: Any) -> Any:
        return np.asarray(places, dtype=np.int64) * self.whole // self.count


class Subset:
    """Some samples of a source, by position."""

    def __init__(self, source: Source, rows: np.ndarray | EvenRows) -> None:
        self.source, self.rows, self.spec = source, rows, source.spec
        self.lengths = None if source.lengths is None else source.lengths[rows[np.arange(len(rows))]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """The source's columns for these samples."""
        return self.source.__getitems__(self.rows[np.asarray(indices)].tolist())


def selected(source: Source, rows: np.ndarray | EvenRows) -> Source:
    """Some samples of a source, by position, augmented as they are in it."""
    if isinstance(source, Augmented):
        return Augmented(selected(source.source, rows), source.augment, source.seed)
    return Subset(source, rows)


def spread_evenly(source: Source, count: int) -> Source:
    """So many samples of a source, spread evenly over it; all of it where it has no more."""
    return source if count >= len(source) else selected(source, EvenRows(count, len(source)))


def open_source(section: DataSection, split: str) -> Source:
    """The "train" or "test" split as its source gives it, capped by data.limit; raises DataError."""
    source = plugins.implementation("data.sources", section.kind).build(section, split)
    if not len(source):
        raise DataError(
            f"the {split} split of data.kind={section.kind} holds no sample: check the paths, columns and options that "
            "`data` names"
        )
    return spread_evenly(source, section.limit) if split == "train" and section.limit is not None else source


def with_tokens(
    source: Source,
    section: DataSection,
    tokenizer: Tokenizer,
    *,
    publish: Callable[[object], None] = lambda _: None,
    is_checked: bool = False,
) -> Source:
    """A text source as tokens, from the cache; publishes Preparing while it builds; `is_checked` reads every byte."""

    def progress(done: int, total: int) -> None:
        publish(Preparing(what="tokenising texts", done=done, total=total))

    return tokenised(source, tokenizer, section.cache, progress=progress, is_checked=is_checked)
