"""Chats as tokens: messages joined by a template, with the assistant's marked as what is learned."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.contracts import Columns, Source
from lockstep.base.errors import DataError
from lockstep.core.host.limited_process import limited
from lockstep.core.numerics.special_tokens import without_marks
from lockstep.core.numerics.word_tokens import ids_of, marked
from lockstep.data.chat_forms import Message
from lockstep.data.chat_template import Template
from lockstep.data.packing import BEGIN, END
from lockstep.data.text_tokenizers import PLAIN, Special, TextTokenizer
from lockstep.data.token_cache import TextFault

ASSISTANT = "assistant"
TEMPLATE, SECONDS = "the chat template", 10.0
"""Name of a template in errors, and its time limit in seconds."""
ASKED, ANSWERED, REPLIED = "Hello", "Zebra", "Thanks"
"""Texts of the chat that shows how a template ends an answer."""
LEADS = ("\n", "\0", "x", "1", ".")
"""Texts to put before another one, until no token spans both."""
AT_ONCE = 64
"""Number of chats whose prefixes are tokenised together."""
THOUGHT = re.compile(r"<(\w+)>(\s*)$")
"""Pattern of a prompt that ends with the opening tag of a thought."""
Piece = tuple[str, bool]
"""A part of a chat, and whether it is learned."""
Render = Callable[..., str]
"""Renders the first messages of a chat, up to a number; `is_prompt`: up to where the assistant answers."""


@dataclass(frozen=True)
class _Ending:
    """Tokens and texts that end an answer."""

    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    has_token: bool = True
    """Whether a token follows the last answer of a chat. Where none does, the tokenizer's end token is learned."""


def is_learned(message: dict[str, Any]) -> bool:
    """Return whether a message is a learned answer: `train: false` and `weight: 0` leave one out, as in Axolotl."""
    return bool(message["role"] == ASSISTANT and message.get("train") is not False and message.get("weight", 1) != 0)


def _read(text: str) -> tuple[list[Message], Any]:
    """Return the messages of a chat, and the schemas of the functions that its assistant can call."""
    chat = without_marks(json.loads(text))
    return (chat["messages"], chat["tools"]) if isinstance(chat, dict) else (chat, None)


class ChatTokenizer:
    """A TextTokenizer of chats, each a JSON list of messages, or an object with `messages` and `tools`; only what the
    assistant says has a target."""

    def __init__(self, inner: TextTokenizer, *, day: date | None = None, skips: bool = False) -> None:
        """`day`: date that the template gets in training; `skips`: leave out chats that the template refuses."""
        self.inner: Any = inner
        """PartsOfWords where there is a template: only then are encoder, names and with_special used."""
        self.pad_id, self.token_bytes, self.begin = inner.pad_id, inner.token_bytes, inner.begin
        self.decode, self.text_after = inner.decode, inner.text_after
        self.skips = skips
        self.template: Template | None = inner.template
        self.day = day if self.template is not None and self.template.asks_for_date else None
        how = "plain" if self.template is None else f"{self.template.text}{self.day or ''}"
        skipping = "skips " if skips and self.template is not None else ""
        self.key = hashlib.sha256(f"chat, ended {skipping}{how} {inner.key}".encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each chat, int32 [T_i], or of each of its answers where the template changes earlier
        turns; an empty array for a chat that it refuses and that is skipped. Multi-threaded. Raises TextFault."""
        chats = [_read(text) for text in texts]
        if self.template is None:
            return self._encoded([_plain(messages) for messages, _ in chats])
        seconds = SECONDS + len(chats) / 10
        rendered = limited(lambda: [self._rendered(*chat) for chat in chats], TEMPLATE, seconds=seconds)
        for number, found in enumerate(rendered):
            if isinstance(found, str) and not self.skips:
                raise TextFault(number, found)
        samples = [sample for found in rendered for sample in ([[]] if isinstance(found, str) else found)]
        parted = self._seamless([self._texts(pieces) for pieces in samples])
        rows = [_marked(parts, pieces) for parts, pieces in zip(parted, samples, strict=True)]
        if self._ending.has_token:
            return rows
        ends = [[self.pad_id] * _ends_learned(pieces) for pieces in samples]
        return [np.append(row, np.array(end, dtype=np.int32)) for row, end in zip(rows, ends, strict=True)]

    def prompt(self, messages: Sequence[Message], *, on: date | None = None, tools: Any = None) -> list[int]:
        """Return tokens up to the assistant's answer; `on`: the template's date, by default now. Raises DataError."""
        messages, tools = without_marks([messages, tools])
        if self.template is None:
            (row,) = self._encoded([_plain(messages, is_prompt=True)])
            return ids_of(row).tolist()
        pieces = limited(
            lambda: _asked(*self._renderer(messages, tools, on, is_prompt=True)), TEMPLATE, seconds=SECONDS
        )
        ((*parts,),) = self._seamless([self._texts(pieces)])
        return [token for part in parts for token in part]

    def special(self) -> Special:
        """Return the tokenizer's special tokens, with the tokens and texts that end an answer by the template."""
        own, ending = self.inner.special(), self._ending
        return replace(own, ends=tuple(dict.fromkeys([*own.ends, *ending.tokens])), end_texts=ending.texts)

    def save(self, folder: Path, *, longest: int | None = None, template: str | None = None) -> None:
        self.inner.save(folder, longest=longest, template=PLAIN if self.template is None else template)

    def _encoded(self, chats: Sequence[Sequence[Piece]]) -> list[np.ndarray]:
        """Return the marked tokens of pieces of chats."""
        rows = iter(self.inner([text for pieces in chats for text, _ in pieces]))
        found = [[ids if is_learned else ~ids for (_, is_learned), ids in zip(p, rows, strict=False)] for p in chats]
        return [np.concatenate(pieces) for pieces in found]

    def _renderer(
        self, messages: Sequence[Message], tools: Any, on: date | None, *, is_prompt: bool = False
    ) -> tuple[Sequence[Message], Render]:
        """Return a chat with escaped names of special tokens, and what renders its first messages. Raises DataError."""
        template = self.template
        assert template is not None
        if self.inner.names is not None:
            whole = partial(template.render, is_prompt=is_prompt, on=on)
            messages, tools = self.inner.names.escaped([messages, tools], lambda chat: whole(chat[0], tools=chat[1]))

        @cache
        def render(count: int, *, is_prompt: bool = False) -> str:
            return template.render(messages[:count], is_prompt=is_prompt, on=on, tools=tools)

        return messages, render

    def _rendered(self, messages: Sequence[Message], tools: Any) -> list[list[Piece]] | str:
        """Return the pieces of each training sample of a chat, or the reason why the template refuses it."""
        try:
            return _samples(*self._renderer(messages, tools, self.day))
        except DataError as error:
            return str(error)

    def _texts(self, pieces: Sequence[Piece]) -> list[str]:
        """Return the texts of pieces, as the tokenizer takes them."""
        return [text if self.inner.names is None else self.inner.names.aliased(text) for text, _ in pieces]

    def _seamless(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Return the tokens of each part of texts, independent of the parts after it, which are unknown in use: where a
        token of the whole text would span two parts, the second is tokenised alone."""
        tokens = list[list[list[int]]]()
        for first in range(0, len(texts), AT_ONCE):
            some = texts[first : first + AT_ONCE]
            beginnings = [beginning for parts in some for beginning in accumulate(parts)]
            encoded = iter(self.inner.encoder.encode_batch(beginnings, add_special_tokens=False))
            for parts in some:
                found, before = list[list[int]](), list[int]()
                for part in parts:
                    ids = next(encoded).ids
                    found.append(ids[len(before) :] if ids[: len(before)] == before else self._alone(part))
                    before += found[-1]
                tokens.append(found)
        return tokens

    def _alone(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another: without a space that a tokenizer puts before all texts."""
        for lead in LEADS:
            encoded = self.inner.encoder.encode(lead + text, add_special_tokens=False)
            after = [start >= len(lead) for start, _ in encoded.offsets]
            is_apart = all(
                is_after or stop <= len(lead) for is_after, (_, stop) in zip(after, encoded.offsets, strict=True)
            )
            if is_apart and after == sorted(after):
                return [id for id, is_after in zip(encoded.ids, after, strict=True) if is_after]
        return list(self.inner.encoder.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _ending(self) -> "_Ending":
        """Tokens and texts that the template writes after an answer, the last one and another."""
        if self.template is None:
            return _Ending()
        try:
            last, within = limited(partial(self._after_answers, self.template), TEMPLATE, seconds=SECONDS)
        except DataError:  # it takes chats of another form
            return _Ending()
        written = self._added(last)[:1]
        text = "" if written else last.rstrip()
        return _Ending((*written, *self._added(within)[:1]), (text,) if text else (), has_token=bool(written))

    def _after_answers(self, template: Template) -> list[str]:
        roles = ("user", ASKED), (ASSISTANT, ANSWERED), ("user", REPLIED)
        messages = [{"role": role, "content": content} for role, content in roles]
        found = [template.render(messages[:count], on=self.day).rpartition(ANSWERED) for count in (2, 3)]
        if not all(answer for _, answer, _ in found):
            raise DataError("the chat template writes no answers")
        return [after.partition(REPLIED)[0] for *_, after in found]

    def _added(self, text: str) -> list[int]:
        """Return the tokens of a text that are no parts of words."""
        known = self.inner.with_special.get_added_tokens_decoder()
        ids = self.inner.with_special.encode(text, add_special_tokens=False).ids
        return [each for each in ids if each in known and known[each].content.strip(" \n\t\u2581")]


def _samples(messages: Sequence[Message], render: Render) -> list[list[Piece]]:
    """Return a chat's pieces as one sample; one per learned answer where its template changes earlier turns.
    Raises DataError."""
    whole = render(len(messages))
    if pieces := _pieces(messages, whole, render):
        said = [each for each in messages[1:] if each["role"] == ASSISTANT and is_learned(each) and each.get("content")]
        if said and not any(text for text, is_answer in pieces if is_answer):
            raise DataError(
                "the chat template leaves out what the assistant says: correct it, or set data.tokenizer=bpe, which "
                "uses a plain template"
            )
        return [pieces]
    learned = [number for number, each in enumerate(messages) if number and is_learned(each)]
    return [
        [*_asked(messages[:number], render), (_answer(messages[number], number, render), True)] for number in learned
    ]


def _asked(messages: Sequence[Message], render: Render) -> list[Piece]:
    """Return the pieces of the prompt for the next answer, cut as in training."""
    prompt = render(len(messages), is_prompt=True)
    return [(text, False) for text, _ in _pieces(messages, prompt, render) or [(prompt, False)]]


def _pieces(messages: Sequence[Message], whole: str, render: Render) -> list[Piece]:
    """Return the pieces of a rendered chat, every second one an answer, or none where the answers cannot be located. An
    assistant's message at the very beginning is context."""
    pieces, end = list[Piece](), 0
    for number in (number for number, each in enumerate(messages) if number and each["role"] == ASSISTANT):
        before, after = render(number, is_prompt=True), render(number + 1)
        if not whole.startswith(before) or not whole.startswith(after):
            return []
        pieces += [(whole[end : len(before)], False), (whole[len(before) : len(after)], is_learned(messages[number]))]
        end = len(after)
    return [*pieces, (whole[end:], False)]


def _answer(message: Message, number: int, render: Render) -> str:
    """Return the text after an answer's prompt. Raises DataError where the rendered answer does not begin with that."""
    prompt, after = render(number, is_prompt=True), render(number + 1)
    if after.startswith(prompt):
        return after[len(prompt) :]
    opening = THOUGHT.search(prompt)
    if not opening or not after.startswith(prompt[: opening.start()]):
        raise DataError(
            "the chat template changes earlier messages when later ones follow, and its answers do not go on from its "
            "prompts, so what the assistant says cannot be found: take another tokenizer, or data.tokenizer=bpe, which "
            "uses a plain template"
        )
    return _thought(message, after[opening.start() :], tag=opening[1], space=opening[2])


def _thought(message: Message, written: str, *, tag: str, space: str) -> str:
    """Return an answer with the thought that its prompt opens and the template drops: the message's own, or an empty
    one in Qwen3's form."""
    end = f"</{tag}>"
    thought, is_own, reply = (message["content"] or "").rpartition(end)
    if is_own:
        thought = thought.lstrip().removeprefix(f"<{tag}>").removeprefix(space)
    else:
        thought, reply = str(message.get("reasoning_content") or "") + "\n", "\n\n"
    written = written.rpartition(end)[2]
    gap = reply[: len(reply) - len(reply.lstrip())]
    return thought + end + gap * (not written.startswith(gap)) + written


def _marked(parts: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> np.ndarray:
    ids = np.array([token for part in parts for token in part], dtype=np.int32)
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    return marked(ids, np.repeat(np.array([is_learned for _, is_learned in pieces], dtype=bool), sizes))


def _ends_learned(pieces: Sequence[Piece]) -> bool:
    written = [is_learned for text, is_learned in pieces if text]
    return bool(written) and written[-1]


def _plain(messages: Sequence[Message], *, is_prompt: bool = False) -> list[Piece]:
    """Return a chat as lines of `role: content`, with the end token after each answer, which is learned with it. What
    is not learned is one text, as in a prompt that others tokenise."""
    pieces, before = list[Piece](), BEGIN
    for message in messages:
        before += f"{message['role']}: "
        if message["role"] == ASSISTANT:
            pieces += [(before, False), ((message["content"] or "") + END, is_learned(message))]
            before = "\n"
        else:
            before += (message["content"] or "") + "\n"
    return [*pieces, (before + f"{ASSISTANT}: " * is_prompt, False)]


class Contents:
    """Contents of messages, as plain texts to learn a tokenizer from."""

    lengths: np.ndarray | None = None

    def __init__(self, chats: Source) -> None:
        self.chats, self.spec = chats, chats.spec

    def __len__(self) -> int:
        return len(self.chats)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {"text": m strings}."""
        chats = map(_read, self.chats.__getitems__(indices)["text"])
        return {"text": ["\n".join(message["content"] or "" for message in messages) for messages, _ in chats]}
