"""Tokenizers of data.kind=text: bytes, parts of words learned from the training texts, or one of transformers."""

import copy
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lockstep.base.contracts import Source
from lockstep.base.errors import DataError
from lockstep.core.host.pretrained_files import load
from lockstep.data.data_config import AUTO, BYTES, LEARNED
from lockstep.data.packing import END
from lockstep.data.token_cache import fingerprint

SAMPLE = 64 << 20
"""Characters of training text from which parts of words are learned."""
END_TOKEN = "<|end|>"
FILE = "tokenizer.json"


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer of transformers."""

    tokenizer: Any

    @property
    def text(self) -> str:
        return str(self.tokenizer.chat_template)

    @property
    def asks_for_date(self) -> bool:
        """Whether its text may hold the date."""
        return "strftime_now" in self.text

    def render(
        self, messages: Sequence[dict[str, str]], *, is_prompt: bool = False, on: date | None = None, tools: Any = None
    ) -> str:
        """The text of messages, as a prompt up to where the assistant answers; `on`: the day that it is told, else the
        moment it is; `tools`: schemas of functions. Raises DataError for messages that the template does not take, such
        as an unknown role."""
        try:
            with _surroundings(on):
                rendered = self.tokenizer.apply_chat_template(
                    [*messages], tokenize=False, add_generation_prompt=is_prompt, tools=tools
                )
        except MemoryError:
            raise
        except Exception as error:  # of Jinja, and of transformers
            raise DataError(f"the chat template does not take this chat: {error}") from error
        return str(rendered)


@contextmanager
def _surroundings(day: date | None) -> Iterator[None]:
    """Inside, templates are told this day, if there is one, and draw the same random choices each time.

    transformers hands no function of ours on to a template, so it is its clock that is set.
    """
    from transformers.utils import chat_template_utils

    theirs: Any = chat_template_utils
    clock, state = theirs.datetime, random.getstate()
    if day is not None:
        theirs.datetime = SimpleNamespace(now=lambda: datetime.combine(day, time()))
    random.seed(0)
    try:
        yield
    finally:
        theirs.datetime = clock
        random.setstate(state)


PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token or sep_token }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The template of tokenizers that have none, for others to read: see lockstep.data.chat."""


@dataclass(frozen=True, kw_only=True)
class Special:
    """Tokens with a meaning of their own."""

    ends: tuple[int, ...]
    """Each of them ends a text or an answer; that of the tokenizer comes first."""
    end_texts: tuple[str, ...] = ()
    """Texts that do so, where a template writes no token."""
    bos: int | None = None
    pad: int | None = None


@runtime_checkable
class TextTokenizer(Protocol):
    """A Tokenizer whose texts can be read again."""

    key: str
    pad_id: int
    """The end token: there is no padding in what is packed."""
    template: Template | None
    """Of chats; None where it has none."""
    token_bytes: np.ndarray
    """Of each token, how many bytes of text it stands for, int64 [V]; all 0 where the tokenizer does not tell."""

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each text, with the end token for END, int32 [T_i]."""

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens."""

    def special(self) -> Special:
        """Its special tokens."""

    def save(self, folder: Path, *, longest: int | None = None, template: str | None = None) -> None:
        """Write it in the form of transformers, for texts of at most so many tokens, with a chat template where it has
        none."""


class Bytes:
    """Tokens 0..255 are bytes of UTF-8, 256 is the end of a text."""

    key, pad_id = BYTES, 256
    template: Template | None = None
    token_bytes = np.array([1] * 256 + [0])

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        rows = []
        for text in texts:
            body, end = text.removesuffix(END), text.endswith(END)
            row = np.frombuffer(body.encode("utf-8", "replace"), np.uint8).astype(np.int32)
            rows.append(np.append(row, np.int32(256)) if end else row)
        return rows

    def decode(self, ids: list[int]) -> str:
        return bytes(each for each in ids if each < 256).decode("utf-8", "replace")

    def special(self) -> Special:
        return Special(ends=(self.pad_id,))

    def save(self, folder: Path, *, longest: int | None = None, template: str | None = None) -> None:
        """Write a byte-pair encoding without pairs, which gives the same tokens."""
        tokenizer = _byte_level(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
        tokenizer.add_special_tokens([END_TOKEN])
        _save(_of_transformers(tokenizer), folder, longest=longest, template=template)


class PartsOfWords:
    """A tokenizer of the library `tokenizers` with an end token."""

    def __init__(self, tokenizer: Any, end_id: int, origin: Any = None) -> None:
        """`origin` is the tokenizer of transformers that it is taken from."""
        tokenizer.encode_special_tokens = True  # a text may hold the name of the end token
        self.tokenizer, self.pad_id, self.origin = tokenizer, end_id, origin
        has_template = getattr(origin, "chat_template", None) not in (None, PLAIN)
        self.template = Template(origin) if has_template else None
        named = json.dumps(getattr(origin, "special_tokens_map", {}), sort_keys=True)  # templates write these
        self.key = hashlib.sha256(
            f"special tokens are text; {end_id} {named} {tokenizer.to_str()}".encode()
        ).hexdigest()
        self.token_bytes = _token_bytes(tokenizer)

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self.tokenizer.encode_batch([text.removesuffix(END) for text in texts], add_special_tokens=False)
        ends = [[self.pad_id] if text.endswith(END) else [] for text in texts]
        return [np.array(row.ids + end, dtype=np.int32) for row, end in zip(encoded, ends, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def special(self) -> Special:
        bos, pad = (getattr(self.origin, name, None) for name in ("bos_token_id", "pad_token_id"))
        return Special(ends=(self.pad_id,), bos=bos, pad=pad)

    def save(self, folder: Path, *, longest: int | None = None, template: str | None = None) -> None:
        _save(
            copy.copy(self.origin) if self.origin else _of_transformers(self.tokenizer),
            folder,
            longest=longest,
            template=template,
        )


def open_tokenizer(kind: str, train: Source, *, vocabulary: int, cache: Path) -> TextTokenizer:
    """The tokenizer that data.tokenizer names; `bpe` is learned once and kept in the cache. Raises DataError."""
    if kind in (BYTES, AUTO):
        return Bytes()
    if kind == LEARNED:
        return _learned(train, vocabulary, cache)
    return _pretrained(kind)


def _learned(train: Source, vocabulary: int, cache: Path) -> PartsOfWords:
    """Byte-pair encoding over bytes: no text is unknown. Source: R. Sennrich et al., 2016; A. Radford et al., 2019."""
    key = hashlib.sha256(f"{vocabulary} {fingerprint(train)}".encode()).hexdigest()[:24]
    file = cache / "tokenizers" / f"{key}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if not file.is_file():
                tokenizer, alphabet = _byte_level(models.BPE()), sorted(pre_tokenizers.ByteLevel.alphabet())
                trainer = trainers.BpeTrainer(
                    vocab_size=vocabulary, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
                )
                tokenizer.train_from_iterator(_sample(train), trainer)
                temporary = file.with_suffix(".tmp")
                tokenizer.save(str(temporary))
                temporary.replace(file)
    except OSError as error:
        raise DataError(f"cannot keep a tokenizer in {cache}: {error.strerror}; name another with data.cache") from None
    return PartsOfWords(Tokenizer.from_file(str(file)), 0)


def saved_tokenizer(kind: str, folder: Path) -> TextTokenizer:
    """The tokenizer that `save` wrote; `kind` is data.tokenizer. Raises DataError."""
    if kind == BYTES:
        return Bytes()
    if kind == LEARNED:
        return PartsOfWords(Tokenizer.from_file(str(folder / FILE)), 0)
    return _pretrained(str(folder))


def _token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Of byte-level tokenizers, whose letters stand for a byte each, and of those of SentencePiece."""
    decoder = str(json.loads(tokenizer.to_str())["decoder"])
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def size(id: int) -> int:
        token = tokenizer.id_to_token(id) or ""
        if id in special or not ("ByteLevel" in decoder or "ByteFallback" in decoder or "Metaspace" in decoder):
            return 0
        if "ByteLevel" in decoder:
            return len(token)
        return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token.replace("\u2581", " ").encode())

    return np.array([size(id) for id in range(tokenizer.get_vocab_size())])


def _byte_level(model: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letters() -> list[str]:
    """The letter that stands for each byte: itself where it can be printed. Source: A. Radford et al., GPT-2, 2019."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _of_transformers(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN)


def _save(tokenizer: Any, folder: Path, *, longest: int | None, template: str | None) -> None:
    """Write a tokenizer of transformers."""
    if longest is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def _sample(train: Source) -> Iterator[str]:
    """Training texts until there is enough to learn from, spread evenly."""
    rows, characters = len(train), 0
    stride = 997 if rows % 997 else 991  # visits every text once
    for number in range(rows):
        (text,) = train.__getitems__([number * stride % rows])["text"]
        yield text.removesuffix(END)
        characters += len(text)
        if characters > SAMPLE:
            return


def _pretrained(name: str) -> PartsOfWords:
    from transformers import AutoTokenizer

    try:
        found: Any = load(AutoTokenizer, name)
    except Exception as error:  # a damaged file can raise anything inside the libraries
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"cannot load data.tokenizer={name}: {reason}; use bytes, bpe, a hub name or a folder"
        ) from error
    end = found.eos_token_id if found.eos_token_id is not None else found.sep_token_id
    if end is None or not found.is_fast:
        raise DataError(f"data.tokenizer={name} has no end token, or no {FILE}: use bytes, bpe or another one")
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    return PartsOfWords(found.backend_tokenizer, int(end), found)
