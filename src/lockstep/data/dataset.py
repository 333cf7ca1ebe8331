"""Open a split: find its source, limit its size, tokenize texts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.base import plugins
from lockstep.base.contracts import Columns, Source, Tokenizer
from lockstep.base.errors import DataError
from lockstep.base.events import Preparing
from lockstep.data.augment import Augmented
from lockstep.data.data_config import DataSection
from lockstep.data.token_cache import tokenized


class EvenRows:
    """Indices of `count` samples spread evenly over `whole`, computed on access: they take no memory."""

    def __init__(self, count: int, whole: int) -> None:
        self.count, self.whole = count, whole

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: Any) -> Any:
        return np.asarray(indices, dtype=np.int64) * self.whole // self.count


class Subset:
    """Some samples of a source, by index."""

    def __init__(self, source: Source, rows: np.ndarray | EvenRows) -> None:
        self.source, self.rows, self.spec = source, rows, source.spec
        self.lengths = None if source.lengths is None else source.lengths[rows[np.arange(len(rows))]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return the source's columns for these samples."""
        return self.source.__getitems__(self.rows[np.asarray(indices)].tolist())


def select(source: Source, rows: np.ndarray | EvenRows) -> Source:
    """Return a subset of a source, with its augmentation."""
    if isinstance(source, Augmented):
        return Augmented(select(source.source, rows), source.augment, source.seed)
    return Subset(source, rows)


def spread_evenly(source: Source, count: int) -> Source:
    """Return `count` samples of a source, spread evenly over it; the source itself if it has no more."""
    return source if count >= len(source) else select(source, EvenRows(count, len(source)))


def open_source(section: DataSection, split: str) -> Source:
    """Open the "train" or "test" split, limited by data.limit. Raises DataError."""
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
    """Tokenize a text source with the token cache. Publishes Preparing meanwhile; `is_checked` verifies every byte."""
    return tokenized(
        source,
        tokenizer,
        section.cache,
        progress=lambda done, total: publish(Preparing(what="tokenising texts", done=done, total=total)),
        is_checked=is_checked,
    )
