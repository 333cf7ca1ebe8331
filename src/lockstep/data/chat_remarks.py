"""Warnings about the chats of a run at its start."""

import re
from collections.abc import Iterator

import numpy as np

from lockstep.base.errors import few
from lockstep.data.chat import ChatTokenizer
from lockstep.data.chat_forms import Chats
from lockstep.data.token_cache import TextFault, Tokens, chunks, place_of

USED = {"role", "content", "train", "weight", "tool_call_id"}
"""Keys of messages that Lockstep itself uses, or that tell a template nothing."""


def left_out(tokens: Tokens, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yield the number of skipped chats of a split, with the reason for the first."""
    if count := int((tokens.lengths == 0).sum()):
        yield f"{count:,} of {len(tokens.source):,} chats are left out: {_first_fault(tokens, tokenizer)}"


def how_learned(tokens: Tokens, tokenizer: ChatTokenizer, *, context: int) -> Iterator[str]:
    """Yield warnings about unused keys, chats that are split into answers, and chats longer than the context."""
    chats, samples, source = len(tokens.source), len(tokens), tokens.source
    template = "" if tokenizer.template is None else tokenizer.template.text
    keys = {*source.keys} - USED if isinstance(source, Chats) else set()
    if unused := sorted(key for key in keys if not re.search(rf"\b{re.escape(key)}\b", template)):
        yield f"neither the chat template nor Lockstep uses some keys of messages: {few(unused)}"
    if samples > chats:
        yield (
            f"the chat template changes earlier turns when later ones follow, so {chats:,} chats are learned as "
            f"{samples:,} samples: each answer as it is asked for (data.turns=last learns the last of each chat alone)"
        )
    if long := int((tokens.lengths > context).sum()):
        yield (
            f"{long:,} of {samples:,} chats have more than data.context={context} tokens, the longest "
            f"{int(tokens.lengths.max()):,}: each is cut into several samples, of which the later ones do not see its "
            "beginning"
        )
    if cut := _cut(tokens.offsets, context):
        yield (
            f"{cut:,} of {samples:,} chats stand across the end of a sample of data.context={context} tokens: what "
            "follows is learned without their beginning; a larger data.context cuts fewer"
        )


def _cut(offsets: np.ndarray, context: int) -> int:
    """Count the rows of at most `context` tokens that windows of this size cut in two; offsets int64 [n + 1]."""
    first, last = offsets[:-1], offsets[1:] - 1
    return int(((first // context < last // context) & (last - first < context)).sum())


def _first_fault(tokens: Tokens, tokenizer: ChatTokenizer) -> str:
    """Return the place of the first chat that the template refuses, and its reason."""
    strict = ChatTokenizer(tokenizer.inner, day=tokenizer.day)
    for start, texts in chunks(tokens.source):
        try:
            strict(texts)
        except TextFault as fault:
            return f"{place_of(tokens.source, start + fault.index)}: {fault}"
    return "the chat template writes nothing"
