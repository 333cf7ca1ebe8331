"""Tokenizers of data.kind=text: bytes, parts of words learned from the training texts, or one of transformers."""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lockstep.base import storage
from lockstep.base.contracts import Source
from lockstep.base.errors import DataError, LockstepError
from lockstep.core.host.pretrained_files import load
from lockstep.core.numerics.special_tokens import SpecialTokens
from lockstep.data.chat_template import Template
from lockstep.data.data_config import AUTO, BYTES, LEARNED, AddBos, SpecialTokensInText
from lockstep.data.packing import unmarked
from lockstep.data.token_cache import fingerprint

SAMPLE = 64 << 20
"""Characters of training text from which parts of words are learned."""
NEAR = 16
"""Tokens before an answer that its text may depend on."""
END_TOKEN = "<|end|>"
FILE = "tokenizer.json"
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token or sep_token }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The template of tokenizers that have none, for others to read: see lockstep.data.chat."""


@dataclass(frozen=True, kw_only=True)
class Special:
    """Tokens with a meaning of their own."""

    ends: tuple[int, ...]
    """Tokens that end a text or an answer; the tokenizer's comes first."""
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
    begin: list[int]
    """Tokens that it puts before every text, such as BOS."""
    template: Template | None
    """Chat template, if there is one."""
    token_bytes: np.ndarray
    """Bytes of text that each token stands for, int64 [V]; all 0 where they are unknown."""

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [T_i], with the end token for END, and what begins a text for BEGIN."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of some tokens."""

    def text_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of tokens that follow others: behind the text of these it is the text of all. A character
        that is not whole is U+FFFD; what further tokens add stands behind the rest."""

    def special(self) -> Special:
        """Return its special tokens."""

    def save(self, folder: Path, *, longest: int | None = None, template: str | None = None) -> None:
        """Write it in the form of transformers, for texts of at most so many tokens, with a chat template where it has
        none."""


class Bytes:
    """Tokens 0..255 are bytes of UTF-8, 256 is the end of a text."""

    key, pad_id = BYTES, 256
    begin: list[int] = []
    template: Template | None = None
    token_bytes = np.array([1] * 256 + [0])

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        rows = []
        for _, body, is_ended in map(unmarked, texts):
            row = np.frombuffer(body.encode("utf-8", "replace"), np.uint8).astype(np.int32)
            rows.append(np.append(row, np.int32(256)) if is_ended else row)
        return rows

    def decode(self, ids: list[int]) -> str:
        return bytes(each for each in ids if each < 256).decode("utf-8", "replace")

    def text_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        return self.decode([*ids])

    def special(self) -> Special:
        return Special(ends=(self.pad_id,))

    def save(self, folder: Path, *, longest: int | None = None, template: str | None = None) -> None:
        """Write a byte-pair encoding without pairs, which gives the same tokens."""
        tokenizer = _byte_level(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
        tokenizer.add_special_tokens([END_TOKEN])
        _save(_of_transformers(tokenizer), folder, longest=longest, template=template)


class PartsOfWords:
    """A tokenizer of the library `tokenizers` with an end token."""

    def __init__(
        self, tokenizer: Any, end_id: int, origin: Any = None, *, special: SpecialTokensInText = "as_text"
    ) -> None:
        """`origin`: the tokenizer of transformers that it is taken from; `special`: data.special_tokens_in_text."""
        self.tokenizer, self.pad_id, self.origin = tokenizer, end_id, origin
        has_own = not (getattr(origin, "chat_template", None) or PLAIN).endswith(PLAIN)
        self.template = Template(origin) if has_own else None
        self.begin = _begin(tokenizer)
        named = json.dumps(getattr(origin, "special_tokens_map", {}), sort_keys=True)  # templates write these
        self.key = hashlib.sha256(
            f"special tokens {special}; {self.begin} {end_id} {named} {tokenizer.to_str()}".encode()
        ).hexdigest()
        self.names = SpecialTokens(tokenizer) if special == "as_text" else None
        """Aliases of special tokens; None for data.special_tokens_in_text=as_tokens."""
        self.pieces = _pieces(tokenizer)
        ids = range(max(tokenizer.get_vocab().values()) + 1)  # which may have holes
        self.token_bytes = np.array([len((self.pieces or {}).get(id, b"")) for id in ids])

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        marks = [*map(unmarked, texts)]
        encoded = self.encoder.encode_batch([text for _, text, _ in marks], add_special_tokens=False)
        return [
            np.array(self.begin * begins + row.ids + [self.pad_id] * ends, dtype=np.int32)
            for row, (begins, _, ends) in zip(encoded, marks, strict=True)
        ]

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def special(self) -> Special:
        bos, pad = (getattr(self.origin, name, None) for name in ("bos_token_id", "pad_token_id"))
        return Special(ends=(self.pad_id,), bos=bos, pad=pad)

    def save(self, folder: Path, *, longest: int | None = None, template: str | None = None) -> None:
        start = "".join(self.tokenizer.id_to_token(id) or "" for id in self.begin)
        if template == PLAIN and start:
            template = f"{{{{ {json.dumps(start, ensure_ascii=False)} }}}}{PLAIN}"
        tokenizer = copy.copy(self.origin) if self.origin else _of_transformers(self.tokenizer)
        _save(tokenizer, folder, longest=longest, template=template)

    def text_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        if self.pieces is None:
            before = [*prompt[-NEAR:]]
            return self.decode([*before, *ids])[len(self.decode(before)) :]
        found = b"".join(self.pieces.get(id, b"") for id in ids)
        if found.startswith(b" ") and self._adds_space(prompt):
            found = found[1:]
        return found.decode("utf-8", "replace")

    def _adds_space(self, prompt: Sequence[int]) -> bool:
        """Return whether the tokenizer itself puts a space before what follows a prompt."""
        assert self.pieces is not None
        if not any(id in self.pieces for id in prompt):
            return self._spaces("")
        return prompt[-1] not in self.pieces and self._spaces(self.tokenizer.id_to_token(prompt[-1]) or "")

    def _spaces(self, special: str) -> bool:
        """Return whether a text behind a special token, or one that begins, gets a space."""
        assert self.pieces is not None
        ids = self.with_special.encode(f"{special}x", add_special_tokens=False).ids
        return b"".join(self.pieces.get(id, b"") for id in ids).startswith(b" ")

    @property
    def encoder(self) -> Tokenizer:
        """Tokenizer of texts, in which special tokens have the aliases of `names`, if there are any."""
        return self.with_special if self.names is None else self.names.tokenizer

    @cached_property
    def with_special(self) -> Tokenizer:
        """The tokenizer in which names of special tokens stand for these."""
        return Tokenizer.from_str(self.tokenizer.to_str())


def open_tokenizer(
    kind: str,
    train: Source,
    *,
    vocabulary: int,
    cache: Path,
    add_bos: AddBos = "auto",
    special: SpecialTokensInText = "as_text",
) -> TextTokenizer:
    """Return the tokenizer that data.tokenizer names; `bpe` is learned once and kept in the cache. Raises DataError."""
    if kind not in (BYTES, AUTO, LEARNED):
        return _pretrained(kind, add_bos, special)
    if add_bos is True:
        raise DataError(f"data.add_bos=true, but data.tokenizer={kind} has no such token: leave it out")
    return _learned(train, vocabulary, cache, special=special) if kind == LEARNED else Bytes()


def _learned(train: Source, vocabulary: int, cache: Path, *, special: SpecialTokensInText) -> PartsOfWords:
    """Learn byte-pair encoding of bytes: no unknown text. Source: R. Sennrich et al., 2016; A. Radford et al., 2019."""
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
                storage.write(file, tokenizer.to_str(pretty=True))
    except OSError as error:
        raise DataError(f"cannot keep a tokenizer in {cache}: {error.strerror}; name another with data.cache") from None
    return PartsOfWords(Tokenizer.from_file(str(file)), 0, special=special)


def saved_tokenizer(
    kind: str, folder: Path, *, add_bos: AddBos = False, special: SpecialTokensInText = "as_text"
) -> TextTokenizer:
    """Return the tokenizer that `save` wrote; `kind` is data.tokenizer. Raises DataError."""
    if kind == BYTES:
        return Bytes()
    if kind == LEARNED:
        return PartsOfWords(Tokenizer.from_file(str(folder / FILE)), 0, special=special)
    return _pretrained(str(folder), add_bos, special)


def _begin(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    whole = tokenizer.encode("a")
    return list(whole.ids[: whole.special_tokens_mask.index(0)])


def _pieces(tokenizer: Tokenizer) -> dict[int, bytes] | None:
    """Return the bytes that each token adds to a text, if any: of byte-level tokenizers, whose letters stand for a byte
    each, and of those of SentencePiece. None for others."""
    decoder = str(json.loads(tokenizer.to_str())["decoder"])
    if not any(name in decoder for name in ("ByteLevel", "ByteFallback", "Metaspace")):
        return None
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    letters = {letter: byte for byte, letter in enumerate(_letters())}

    def piece(token: str) -> bytes:
        if "ByteLevel" in decoder:
            return bytes(letters[each] for each in token) if letters.keys() >= {*token} else token.encode()
        is_byte = re.fullmatch("<0x[0-9A-F]{2}>", token)
        return bytes.fromhex(token[3:5]) if is_byte else token.replace("\u2581", " ").encode()

    found = {id: piece(token) for token, id in tokenizer.get_vocab().items() if id not in special}
    return {id: text for id, text in found.items() if text}


def _byte_level(model: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letters() -> list[str]:
    """Return the letter that stands for each byte: itself if printable. Source: A. Radford et al., GPT-2, 2019."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _of_transformers(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN)


def _save(tokenizer: Any, folder: Path, *, longest: int | None, template: str | None) -> None:
    if longest is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def _sample(train: Source) -> Iterator[str]:
    """Yield training texts until there are enough to learn from, spread evenly."""
    rows, characters = len(train), 0
    stride = 997 if rows % 997 else 991  # visits every text once
    for number in range(rows):
        (text,) = train.__getitems__([number * stride % rows])["text"]
        yield unmarked(text)[1]
        characters += len(text)
        if characters > SAMPLE:
            return


def _pretrained(name: str, add_bos: AddBos, special: SpecialTokensInText) -> PartsOfWords:
    from transformers import AutoTokenizer

    options = {} if add_bos == "auto" else {"add_bos_token": add_bos}
    try:
        found: Any = load(AutoTokenizer, name, **options)
    except LockstepError:
        raise
    except Exception as error:  # a damaged file can raise anything inside the libraries
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"cannot load the tokenizer {name} ({reason}): set data.tokenizer to bytes, bpe, a folder or a hub name; "
            "by default it is the model's own"
        ) from error
    end = found.eos_token_id if found.eos_token_id is not None else found.sep_token_id
    if end is None or not found.is_fast:
        raise DataError(f"data.tokenizer={name} has no end token, or no {FILE}: use bytes, bpe or another one")
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    made = PartsOfWords(found.backend_tokenizer, int(end), found, special=special)
    if add_bos is True and not made.begin:
        raise DataError(f"data.add_bos=true, but data.tokenizer={name} has no BOS token: leave it out")
    return made
