"""Texts of words as one string, and tokens that are marked where they have a target.

T = tokens of a text. A *marked* token is the id itself, int32, where it has a target: it begins a word, or is part of
what an assistant says. Else it is ~id, which is negative: a text stays one array.
"""

from collections.abc import Iterable

import numpy as np

END = "\x1f"
"""Separator after each word of a text that is split already; no word contains it."""
IGNORED = -100
"""Target of tokens without one: cross-entropy leaves it out."""


def joined(words: Iterable[str]) -> str:
    return "".join(f"{word}{END}" for word in words)


def words_of(text: str) -> list[str]:
    """Split a joined text into its words, and any other at white space."""
    return [word for word in text.split(END) if word] if END in text else text.split()


def with_spaces(text: str) -> str:
    """Return the text with spaces between its words."""
    return " ".join(words_of(text)) if END in text else text


def marked(ids: np.ndarray, has_target: np.ndarray) -> np.ndarray:
    """Mark ids [T] by bool [T], whether each has a target -> marked tokens, int32 [T]."""
    return np.where(has_target, ids, ~ids).astype(np.int32)


def ids_of(tokens: np.ndarray) -> np.ndarray:
    """Return the ids of tokens, marked or not."""
    return np.where(tokens < 0, ~tokens, tokens)


def spread(classes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the class of each marked token, int64 [T], from those of the words, of which the last may have no token.
    Raises ValueError for fewer classes than words."""
    begins = np.flatnonzero(tokens >= 0)
    if len(classes) < len(begins):
        raise ValueError(f"there are {len(begins)} words and {len(classes)} classes")
    found = np.full(len(tokens), IGNORED, dtype=np.int64)
    found[begins] = classes[: len(begins)]
    return found
