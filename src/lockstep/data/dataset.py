"""Open a split: find its source, limit its size, tokenize texts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base import plugins
from lockstep.base.contracts import Columns, Source, Tokenizer
from lockstep.base.errors import DataError
from lockstep.base.events import Preparing, Warned
from lockstep.base.remote_path import RemotePath
from lockstep.core.host import remote_storage
from lockstep.data.augment import Augmented
from lockstep.data.chat import ChatTokenizer
from lockstep.data.chat_remarks import how_learned, left_out
from lockstep.data.data_config import DataSection
from lockstep.data.packing import Windows, document_starts
from lockstep.data.stream import Stream
from lockstep.data.text_tokenizers import TextTokenizer
from lockstep.data.token_cache import TokenizedStream, Tokens, tokenized
from lockstep.data.torch_dataset import DatasetSource

REMAINDER = 0.01
"""Share of a split's tokens that fill no sample, from which on a run reports them."""


class EvenRows:
    """Indices of `count` samples spread evenly over `whole`, computed on access: they take no memory. Where both are
    the same, those of the first samples, and of any after them, of which a stream has any number."""

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
        return self.source.__getitems__(self.rows[np.asarray(indices)].tolist())


def stream_of(source: Source) -> Stream | None:
    """Return the stream that a source reads from; None where it has random access."""
    while isinstance(source, Augmented | Subset | TokenizedStream):
        source = source.source
    dataset = source.dataset if isinstance(source, DatasetSource) else None
    return dataset if isinstance(dataset, Stream) else None


def select(source: Source, rows: np.ndarray | EvenRows) -> Source:
    """Return a subset of a source, with its augmentation."""
    if isinstance(source, Augmented):
        return Augmented(select(source.source, rows), *source.augments, seed=source.seed)
    return Subset(source, rows)


def spread_evenly(source: Source, count: int) -> Source:
    """Return `count` samples spread evenly over a source, or the first of a stream; the source if it has no more."""
    if count >= len(source):
        return source
    return select(source, EvenRows(count, len(source) if stream_of(source) is None else count))


def open_source(section: DataSection, split: str, *, publish: Callable[[object], None] = lambda _: None) -> Source:
    """Open the "train" or "test" split, limited by data.limit. Publishes Preparing while files are copied from an
    object store. Raises DataError, RemoteStorageError."""
    source = plugins.implementation("data.sources", section.kind).build(_on_this_machine(section, publish), split)
    if not len(source):
        raise DataError(
            f"the {split} split of data.kind={section.kind} holds no sample: check the paths, columns and options that "
            "`data` names"
        )
    for remark in getattr(source, "remarks", ()):
        publish(Warned(message=remark))
    return limited(source, section, split) if not section.PACKS else source


def _on_this_machine(section: DataSection, publish: Callable[[object], None]) -> DataSection:
    """Return the section with local copies in place of paths in an object store."""

    def copy(place: RemotePath) -> Path:
        what = f"copying {place}"
        return remote_storage.here(
            place, section.cache, lambda done, total: publish(Preparing(what=what, done=done, total=total))
        )

    remote = {name: value for name, value in section if isinstance(value, RemotePath)}
    return section.model_copy(update={name: copy(place) for name, place in remote.items()}) if remote else section


def limited(source: Source, section: DataSection, split: str) -> Source:
    """Return the samples that data.limit leaves of a split; of a stream, the first of each pass."""
    if (stream := stream_of(source)) is not None:
        if split == "train" and section.limit is not None:
            stream.limit_to(section.limit)
        return source
    return spread_evenly(source, section.limit) if split == "train" and section.limit is not None else source


def measurable(source: Source, limit: int | None) -> Source:
    """Return a split for evaluation: of a stream, its first `limit` samples. Raises DataError."""
    if (stream := stream_of(source)) is not None:
        stream.measure(limit)
    return source


def with_tokens(
    source: Source,
    section: DataSection,
    tokenizer: Tokenizer,
    *,
    publish: Callable[[object], None] = lambda _: None,
    is_checked: bool = False,
) -> Tokens | TokenizedStream:
    """Tokenize texts with the cache, or a stream as it is read. Publishes Preparing; `is_checked` checks every byte."""
    if stream_of(source) is not None:
        return TokenizedStream(source, tokenizer)
    return tokenized(
        source,
        tokenizer,
        section.cache,
        progress=lambda done, total: publish(Preparing(what="tokenising texts", done=done, total=total)),
        is_checked=is_checked,
    )


def packed(
    source: Source,
    section: Any,
    tokenizer: TextTokenizer,
    *,
    split: str = "test",
    publish: Callable[[object], None] = lambda _: None,
    is_checked: bool = False,
) -> Windows:
    """Tokenize texts, join them, and cut them into samples of section.context tokens. Raises DataError."""
    tokens = with_tokens(source, section, tokenizer, publish=publish, is_checked=is_checked)
    assert isinstance(tokens, Tokens)  # no source of such texts is a stream
    remarks = list[str]()
    if isinstance(tokenizer, ChatTokenizer):
        remarks += left_out(tokens, tokenizer)
        if split == "train":
            remarks += how_learned(tokens, tokenizer, context=section.context)
    starts = document_starts(tokens) if section.documents == "apart" else None
    try:
        windows = Windows(tokens, tokenizer.token_bytes, context=section.context, starts=starts)
    except DataError as error:
        more = ", data.test_fraction to more, or data.test to a file" if split == "test" else ""
        raise DataError(f"the {split} split: {error}{more}") from None
    if windows.remainder() > REMAINDER * len(windows.ids):
        remarks.append(
            f"the last {windows.remainder():,} of {len(windows.ids):,} tokens of the {split} split fill no sample of "
            f"data.context={section.context}, and are left out"
        )
    for remark in remarks:
        publish(Warned(message=remark))
    return windows
