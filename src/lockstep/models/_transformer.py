"""Classifiers of texts and of words, and tokenizers, from transformers: load, check, save."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model
from lockstep.core.numerics.special_tokens import SpecialTokens
from lockstep.core.numerics.word_tokens import marked, words_of
from lockstep.models._documents import are_close
from lockstep.models._pretrained import (
    NetworkModel,
    check_task,
    check_vocabulary,
    from_pretrained,
    position_rows,
    resize_embeddings,
    with_new_head,
)
from lockstep.models.objectives._choice import TAGS, name_of
from lockstep.models.transformer import Config

SHORT = 256
"""Tokens up to which plain attention is faster on a CPU."""
LONG = 4096
"""Number of tokens up to which a trial finds out whether a model takes them."""
CHARACTERS_PER_TOKEN = 64
"""Only this much of a long text is tokenized at first; typical text has five characters per token."""


class TextModel(NetworkModel):
    """A classifier of texts, or of each token."""

    def __init__(self, network: nn.Module, spec: DataSpec) -> None:
        super().__init__(network, spec)
        summary = getattr(network, "sequence_summary", None)
        self.reads_last = getattr(summary, "summary_type", None) == "last"
        """Whether it classifies a text by the last token of its row, as XLNet does: its padding is at the left."""
        self.positions = position_rows(network)
        settings: Any = network.config
        self.end = (
            settings.eos_token_id if settings.is_encoder_decoder and hasattr(network, "classification_head") else None
        )
        """End token at whose last position a text is classified, of BART and T5."""

    @classmethod
    def auto_class(cls, spec: DataSpec | None) -> Any:
        from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

        has_words = spec is not None and name_of(spec) == TAGS
        return AutoModelForTokenClassification if has_words else AutoModelForSequenceClassification

    def forward(self, batch: Batch) -> Tensor:
        """Token ids and mask, int64 [m, T] -> outputs [m, K], such as logits of classes, or [m, T, K]."""
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        if self.reads_last:
            order = torch.arange(tokens.shape[1], device=tokens.device) + mask.sum(1, keepdim=True)
            tokens, mask = (each.gather(1, order % tokens.shape[1]) for each in (tokens, mask))
        beyond = tokens.shape[1] - (self.positions or tokens.shape[1])
        if beyond <= 0:
            return self._logits(tokens, mask)
        # positions that padding to a multiple of 8 does not have
        logits = self._logits(tokens[:, : self.positions], mask[:, : self.positions])
        return F.pad(logits, (0, 0, 0, beyond)) if logits.ndim == 3 else logits

    def _logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        network: Any = self.network
        if self.end is None:
            return network(input_ids=tokens, attention_mask=mask).logits
        # as its own forward pass, which wants equally many ends in all rows
        more = {"decoder_input_ids": network._shift_right(tokens)} if hasattr(network, "_shift_right") else {}
        hidden = network.base_model(input_ids=tokens, attention_mask=mask, use_cache=False, **more)[0]
        rows = torch.arange(tokens.shape[1], device=tokens.device)
        last = (rows * ((tokens == self.end) & mask.bool())).max(1).values
        return network.classification_head(hidden[torch.arange(len(last), device=last.device), last])


def build(config: Config, spec: DataSpec) -> Model:
    """Load pretrained weights, with a new head for the data's targets, named in its config. Raises ModelError."""
    network, notes = with_new_head(TextModel.auto_class(spec), config, spec, attn_implementation=_attention(config))
    text_config = network.config.get_text_config()
    if config.resize_embeddings:
        notes += resize_embeddings(network, PretrainedTokenizer(config, spec).size)
    text_config.use_cache = False  # in a decoder, a recomputed layer would append its keys twice
    if text_config.pad_token_id is None:
        pad = PretrainedTokenizer(config, spec)
        network.config.pad_token_id = text_config.pad_token_id = pad.pad_id
        notes.append(
            f"{config.name} has no padding token: texts are padded with {pad.pad_token!r} (id {pad.pad_id}), "
            "which the model's config now names"
        )
    model = TextModel(network.float(), spec)
    _check_length(model, config, text_config)
    if model.end is not None and model.end not in PretrainedTokenizer(config, spec)(["a"])[0]:
        raise ModelError(
            f"model.name={config.name} classifies a text by its end token (id {model.end}), which its tokenizer does "
            "not add: save it with a tokenizer that does"
        )
    if not _bears_padding(model, text_config):
        notes.append(
            f"with {config.name} padding changes the outputs: in training a text depends a little on those beside it; "
            "where the model is used, texts of the same length are read together"
        )
    model._lockstep_notes = tuple(notes)
    return model


def _check_length(model: TextModel, config: Config, text_config: Any) -> None:
    """Raise ModelError where the model has no positions for texts of model.max_length: by its table of them, or tried
    out, since positions need not be a table."""
    table = model.positions or config.max_length

    def refuse(reason: str, longest: int = table) -> ModelError:
        return ModelError(
            f"model.max_length={config.max_length} is more tokens than {config.name} has positions for "
            f"({longest}; {reason}): set model.max_length to {longest} or less"
        )

    if config.max_length > table:
        raise refuse("the rows of its table")
    segments = getattr(text_config, "segment_means_seq_len", 0)
    if segments != getattr(text_config, "num_landmarks", segments):
        raise ModelError(
            f"{config.name} has landmarks, with which transformers reads no padded texts: set num_landmarks={segments} "
            "in its config.json, its segment_means_seq_len, for attention to all tokens with the same weights"
        )
    positions = getattr(text_config, "max_position_embeddings", None) or config.max_length
    if config.max_length + 2 <= positions or config.max_length > LONG:
        return
    tokens = torch.full((1, config.max_length), (text_config.pad_token_id + 1) % text_config.vocab_size)
    tokens[0, -1] = tokens[0, -1] if model.end is None else model.end
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    model.tried_out(batch, lambda reason: refuse(reason, min(positions, table)))


def _bears_padding(model: TextModel, text_config: Any) -> bool:
    """Return whether outputs of a text are the same alone and beside a longer one; True where no trial is possible."""
    tokens = torch.full((2, 16), (text_config.pad_token_id + 1) % text_config.vocab_size)
    mask = torch.ones_like(tokens)
    tokens[0, 5:], mask[0, 5:] = text_config.pad_token_id, 0
    try:
        together, alone = (
            model.tried_out({"input_ids": tokens[:, :size], "attention_mask": mask[:, :size]}, ModelError)
            for size in (16, 5)
        )
    except ModelError:  # some take no such tokens
        return True
    return together is None or are_close(together[0].float()[:5], alone[0].float()[:5])


def _attention(config: Config) -> str | None:
    """Return the implementation of attention; None for transformers' own choice.

    With dropout, PyTorch's fused attention falls back on a CPU to plain operations and more of them: steps of MiniLM in
    bf16 took 1.04 to 1.13 times as long for 24 to 256 tokens; without dropout 1.2 to 1.4 times, and 0.9 for 512.
    """
    if config.attention != "auto":
        return config.attention
    is_short = config.max_length <= SHORT and not torch.cuda.is_available()
    return "eager" if is_short else None


class PretrainedTokenizer:
    """The tokenizer saved with the model; marks tokens where labels are of words. Raises ModelError if not loaded."""

    def __init__(self, config: Config, spec: DataSpec | None = None, *, special: str = "as_text") -> None:
        """`special`: data.special_tokens_in_text."""
        from transformers import AutoTokenizer

        settings = list[Any]()

        def check(found: Any) -> None:
            check_task(TextModel.auto_class(spec), config, found)
            settings.append(found)

        self.tokenizer = from_pretrained(AutoTokenizer, config, check=check)
        self.has_words = spec is not None and name_of(spec) == TAGS
        if self.has_words and not self.tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer of model.name={config.name} does not tell which word a token belongs to, as those with "
                "a tokenizer.json do: choose another model for data.labels=tags"
            )
        if self.has_words and getattr(self.tokenizer, "add_prefix_space", None) is False:  # words begin with a space
            self.tokenizer = from_pretrained(AutoTokenizer, config, check=check, add_prefix_space=True)
        self.size = max(self.tokenizer.get_vocab().values()) + 1
        """Number of embeddings that it needs, the largest token id + 1."""
        mend = "save the tokenizer that the model was trained with beside it"
        for each in settings[:1]:
            check_vocabulary(config, each, self.size, owner="the tokenizer beside it has", mend=mend)
        if self.has_words:
            self.tokenizer.truncation_side = "right"
        self.max_length = config.max_length
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.unk_token
        self.pad_token = self.tokenizer.pad_token
        self.pad_id = int(self.tokenizer.pad_token_id or 0)
        self.reader, self.unknown = _as_text(self.tokenizer) if special == "as_text" else (self.tokenizer, "")
        """Tokenizer of texts, and the alias of its unknown token, if it has one."""
        splits = special if special == "as_text" else f"{special} {self.reader.split_special_tokens}"
        form = f"{'words ' if self.has_words else ''}{self.max_length} {self.tokenizer.truncation_side} {splits}"
        form += " padding for nothing" * (not self.tokenizer("")["input_ids"])  # or there would be no row at all
        self.key = hashlib.sha256(f"{form} {_state_of(self.tokenizer)}".encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Return token ids with special tokens, int32 [T_i] per text, 1 <= T_i <= max_length; multi-threaded. Of texts
        of words they are marked."""
        if self.has_words:
            return self._marked([words_of(text)[: self.max_length] for text in texts])
        starts = [self._start(text) for text in texts]
        ids = self._ids(starts)
        for index, text in enumerate(texts):
            if len(starts[index]) < len(text) and len(ids[index]) < self.max_length:
                (ids[index],) = self._ids([text])
        return ids

    def _start(self, text: str) -> str:
        """Cut a long text between words: tokenizers truncate only after tokenizing all of it, seconds for megabytes."""
        limit = CHARACTERS_PER_TOKEN * self.max_length
        if len(text) <= limit or self.tokenizer.truncation_side != "right":
            return text
        end = max(text.rfind(space, 0, limit) for space in (" ", "\n"))
        return text[:end].rstrip() if end > 0 else text

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self.reader(texts, truncation=True, max_length=self.max_length, return_attention_mask=False)
        return [np.array(ids or [self.pad_id], dtype=np.int32) for ids in encoded["input_ids"]]

    def _marked(self, texts: list[list[str]]) -> list[np.ndarray]:
        """Mark tokens of words. A word without a token, such as a control character, becomes the unknown one."""
        found = []
        for words, (ids, of_word) in zip(texts, self._encoded(texts), strict=True):
            reached = len(words) if len(ids) < self.max_length else of_word.max(initial=-1) + 1
            if lost := {*range(reached)} - {*of_word.tolist()}:
                unknown = self.unknown or self.tokenizer.unk_token or "?"
                ((ids, of_word),) = self._encoded([[unknown if i in lost else each for i, each in enumerate(words)]])
            begins = (of_word >= 0) & (np.diff(of_word, prepend=-1) != 0)
            found.append(marked(ids, begins) if len(ids) else marked(np.array([self.pad_id]), np.array([False])))
        return found

    def _encoded(self, texts: list[list[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return token ids of words, and the number of the word that each belongs to, -1 for special tokens."""
        if not texts:
            return []
        encoded = self.reader(texts, is_split_into_words=True, truncation=True, max_length=self.max_length)
        rows = range(len(texts))
        words = [[-1 if word is None else word for word in encoded.word_ids(row)] for row in rows]
        return [(np.array(encoded["input_ids"][row], np.int32), np.array(words[row], np.int32)) for row in rows]

    def save(self, folder: Path) -> None:
        longest, self.tokenizer.model_max_length = self.tokenizer.model_max_length, self.max_length
        self.tokenizer.save_pretrained(folder)
        self.tokenizer.model_max_length = longest


def _as_text(tokenizer: Any) -> tuple[Any, str]:
    """Return a tokenizer for which names of special tokens are letters, and the alias of its unknown token."""
    reader = copy.copy(tokenizer)
    reader.split_special_tokens = not tokenizer.is_fast
    if not tokenizer.is_fast:
        return reader, ""
    names = SpecialTokens(tokenizer.backend_tokenizer)
    reader._tokenizer = names.tokenizer
    return reader, names.aliases.get(tokenizer.unk_token, "")


def _state_of(tokenizer: Any) -> str:
    """Return everything by which a tokenizer of transformers divides a text, except for the maximal length."""
    if tokenizer.is_fast:
        return str(tokenizer.backend_tokenizer.to_str())
    return json.dumps([sorted(tokenizer.get_vocab().items()), str(tokenizer)])


tokenizer, save, save_config = PretrainedTokenizer, TextModel.save, TextModel.save_config
read_back, from_config = TextModel.read_back, TextModel.from_config
