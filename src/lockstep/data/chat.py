"""Chats as tokens: messages joined by a template, with the assistant's marked as what is learned."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lockstep.base.contracts import Columns, Source
from lockstep.base.errors import DataError
from lockstep.core.host.limited_process import limited
from lockstep.core.numerics.word_tokens import ids_of, marked
from lockstep.data.packing import END
from lockstep.data.text_tokenizers import Template, TextTokenizer

ASSISTANT = "assistant"
TEMPLATE, SECONDS = "the chat template", 10.0
"""A template of somebody else, and how long it may take."""
Message = dict[str, str]
Piece = tuple[str, bool]
"""A part of a chat, and whether it is learned."""


def fault(messages: Any) -> str:
    """What is wrong with a list of messages; empty where nothing is."""
    if not isinstance(messages, list) or not messages:
        return 'a chat is a list of messages such as {"role": "user", "content": "..."}'
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                return f"message {number + 1} has no text {key!r}"
    return ""


class ChatTokenizer:
    """A TextTokenizer of chats, each a JSON list of messages; only what the assistant says has a target."""

    def __init__(self, inner: TextTokenizer) -> None:
        self.inner, self.pad_id, self.token_bytes = inner, inner.pad_id, inner.token_bytes
        self.template: Template | None = inner.template
        how = "plain" if self.template is None else self.template.text
        self.key = hashlib.sha256(f"chat {how} {inner.key}".encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each chat, int32 [T_i]; multi-threaded. Raises DataError where the template does not take the
        messages."""
        chats = [json.loads(text) for text in texts]
        if self.template is None:
            return self._encoded([_plain(messages) for messages in chats])
        seconds = SECONDS + len(chats) / 10
        rendered = limited(lambda: [self._rendered(messages) for messages in chats], TEMPLATE, seconds=seconds)
        encoded = self._with_special.encode_batch([whole for whole, _ in rendered], add_special_tokens=False)
        return [_marked(spans, each) for (_, spans), each in zip(rendered, encoded, strict=True)]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to where the assistant answers. Raises DataError."""
        if self.template is None:
            (row,) = self._encoded([[*_plain(messages), (f"{ASSISTANT}: ", False)]])
            return ids_of(row).tolist()
        render = partial(self.template.render, messages, is_prompt=True)
        text = limited(render, TEMPLATE, seconds=SECONDS)
        return list(self._with_special.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)

    def save(self, folder: Path) -> None:
        self.inner.save(folder)

    def _encoded(self, chats: Sequence[Sequence[Piece]]) -> list[np.ndarray]:
        """Marked tokens of pieces of chats."""
        rows = iter(self.inner([text for pieces in chats for text, _ in pieces]))
        found = [[ids if is_learned else ~ids for (_, is_learned), ids in zip(p, rows, strict=False)] for p in chats]
        return [np.concatenate(pieces) for pieces in found]

    def _rendered(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, as the template renders it, and where its answers are."""
        assert self.template is not None
        whole = self.template.render(messages)
        return whole, [self._span(messages, n, whole) for n, each in enumerate(messages) if each["role"] == ASSISTANT]

    def _span(self, messages: Sequence[Message], number: int, whole: str) -> tuple[int, int]:
        """Where an answer starts and stops in the text of a chat, as the template renders its beginnings."""
        assert self.template is not None
        before = self.template.render(messages[:number], is_prompt=True)
        after = self.template.render(messages[: number + 1])
        if not whole.startswith(before) or not whole.startswith(after):
            raise DataError(
                "the chat template changes earlier messages when later ones follow, so what the assistant says cannot "
                "be found in it: take another tokenizer, or data.tokenizer=bpe, which uses a plain template"
            )
        return len(before), len(after)

    @cached_property
    def _with_special(self) -> Tokenizer:
        """Where a template names special tokens, these are meant."""
        inner: Any = self.inner
        return Tokenizer.from_str(inner.tokenizer.to_str())


def _marked(spans: Sequence[tuple[int, int]], encoded: Any) -> np.ndarray:
    """Marked tokens of the text of a chat."""
    ids, offsets = np.array(encoded.ids, dtype=np.int32), np.array(encoded.offsets).reshape(-1, 2)
    is_learned = np.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        is_learned |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 1] > offsets[:, 0])
    return marked(ids, is_learned)


def _plain(messages: Sequence[Message]) -> list[Piece]:
    """`role: content` in lines, with the end token after each answer, which is learned with it."""
    pieces: list[Piece] = []
    for message in messages:
        is_answer = message["role"] == ASSISTANT
        pieces.append((f"{message['role']}: ", False))
        pieces.append((message["content"] + END * is_answer, is_answer))
        pieces.append(("\n", False))
    return pieces


class Contents:
    """What is said in chats, as plain texts to learn a tokenizer from."""

    lengths: np.ndarray | None = None

    def __init__(self, chats: Source) -> None:
        self.chats, self.spec = chats, chats.spec

    def __len__(self) -> int:
        return len(self.chats)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """{"text": m strings}."""
        chats = map(json.loads, self.chats.__getitems__(indices)["text"])
        return {"text": ["\n".join(message["content"] for message in chat) for chat in chats]}
