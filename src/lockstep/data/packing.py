"""Join the tokens of all texts, and cut them into samples of the same length for language models."""

from collections.abc import Sequence

import numpy as np

from lockstep.base.contracts import Columns, DataSpec
from lockstep.base.errors import DataError
from lockstep.core.numerics.word_tokens import IGNORED, ids_of
from lockstep.data.token_cache import Tokens, place_of

BEGIN = END = "\uffff"
"""Begins and ends a text, in place of the tokenizer's own tokens: no character, so it is in no text."""
UNREADABLE = "\ufffd"
"""Replacement of bytes that are no text."""


def held_out_rows(
    count: int, fraction: float, split: str, *, of: str = "data.train", mend: str = "name a file for data.test"
) -> np.ndarray:
    """Return the rows of a split where a part is held out for the test, spread evenly. Raises DataError for too few,
    which says what they are `of`."""
    held = max(1, round(count * fraction))
    if held >= count:
        raise DataError(f"{of} holds too little to hold a part out: {mend}")
    is_held = np.zeros(count, dtype=bool)
    is_held[(2 * np.arange(held) + 1) * count // (2 * held)] = True
    return np.flatnonzero(is_held == (split == "test"))


def unmarked(text: str) -> tuple[bool, str, bool]:
    """Return a text without BEGIN and END, and whether each was there."""
    ended = text.removesuffix(END)
    return ended.startswith(BEGIN), ended.removeprefix(BEGIN), ended != text


def document_starts(tokens: Tokens) -> np.ndarray:
    """Return the first token of each document, int64, in order; a source of pieces says which of them begin one."""
    starts, begins = tokens.offsets[:-1], getattr(tokens.source, "begins", None)
    return starts if begins is None else starts[begins]


class Windows:
    """Sample i is the tokens i * T to (i + 1) * T, with the one that follows each as its target.

    The tokens stay in their memory-mapped file; a sample may hold the end of one text and the beginning of another.
    A token that is marked as read only (~id) is no target, nor is the first one of a document that is kept apart.
    """

    lengths: np.ndarray | None = None

    def __init__(
        self, tokens: Tokens, token_bytes: np.ndarray, *, context: int, starts: np.ndarray | None = None
    ) -> None:
        """`starts`: first tokens of documents kept apart. Raises DataError for fewer tokens than one sample takes."""
        self.tokens, self.token_bytes, self.context, self.starts = tokens, token_bytes, context, starts
        self.ids = tokens.ids
        self.spec = DataSpec(
            modality="tokens", vocabulary=len(token_bytes), context=context, documents=starts is not None
        )
        if len(self) == 0:
            raise DataError(
                f"it holds only {len(self.ids):,} tokens of text, too few for a sample of data.context={context} and "
                "the token after it: name more text, or set data.context to less"
            )

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.context

    def holding(self, texts: np.ndarray) -> np.ndarray:
        """Return the samples that hold a token of any of these texts, also as the last target, int64, sorted."""
        firsts, stops = self.tokens.offsets[texts], self.tokens.offsets[texts + 1]
        spans = zip(np.maximum(firsts - 1, 0) // self.context, -(-stops // self.context), strict=True)
        found = {sample for first, stop in spans for sample in range(first, min(stop, len(self)))}
        return np.array(sorted(found), dtype=np.int64)

    def place(self, index: int) -> str:
        """Return the place of the text in which a sample begins, where each text is tokenized as one."""
        if len(self.tokens) != len(self.tokens.source):  # a chat whose turns are learned one by one
            return f"sample {index}"
        row = np.searchsorted(self.tokens.offsets, index * self.context, side="right") - 1
        return place_of(self.tokens.source, int(row))

    def remainder(self) -> int:
        """Return the number of tokens at the end that fill no sample."""
        return len(self.ids) - 1 - len(self) * self.context

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {"input_ids", "target": int64 [m, T]}, and "bytes", int64 [m], of the text that the targets stand for,
        where the tokenizer tells; "document", int64 [m, T], from 0, where documents are kept apart."""
        size = self.context
        rows = np.stack([self.ids[i * size : (i + 1) * size + 1] for i in indices]).astype(np.int64)
        is_learned, tokens = rows[:, 1:] >= 0, ids_of(rows)
        numbers = None if self.starts is None else np.stack([self._documents(i, self.starts) for i in indices])
        if numbers is not None:
            is_learned &= numbers[:, 1:] == numbers[:, :-1]
        columns = {"input_ids": tokens[:, :-1], "target": np.where(is_learned, tokens[:, 1:], IGNORED)}
        if self.token_bytes.any():
            columns["bytes"] = (self.token_bytes[tokens[:, 1:]] * is_learned).sum(1)
        return columns if numbers is None else {**columns, "document": numbers[:, :-1]}

    def _documents(self, index: int, starts: np.ndarray) -> np.ndarray:
        """Return the number of the document, from 0, of each token of a sample and the one after it, int64 [T + 1]."""
        first = index * self.context
        low, high = np.searchsorted(starts, [first, first + self.context], side="right")
        is_start = np.zeros(self.context + 1, dtype=np.int64)
        is_start[starts[low:high] - first] = 1  # once, also where documents without a token begin there, too
        return is_start.cumsum()
