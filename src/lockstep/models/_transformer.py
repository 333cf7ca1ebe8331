"""Text classifiers and tokenizers from transformers: load, check, save."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.base import storage
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Model, TensorPlan
from lockstep.core.host.hub_access import hub_answers
from lockstep.core.modules.blocks import blocks_of
from lockstep.core.numerics.loss import classification_loss
from lockstep.models.transformer import Config

WITHOUT_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Without it, transformers asks on the terminal whether to import the code that config.json names."""
MAX_CONFIG_BYTES = 64 << 20
MAX_LAYERS = 10_000
MIN_VOCABULARY = 3
"""Tokens besides the special ones; without tokenizer files, transformers makes up a tokenizer with 0 to 2."""
SHORT = 256
"""Tokens up to which plain attention is faster on a CPU."""
MAX_NAMES = 3
"""Weights named in a message."""
CHARACTERS_PER_TOKEN = 64
"""Only this much of a long text is tokenized at first; typical text has five characters per token."""


class TextClassifier(Model):
    """Adapter from a transformers model (`network`) to Lockstep's Model."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        """Token ids and mask, int64 [m, T] -> logits [m, classes]."""
        return self.network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def loss(self, outputs: Tensor, batch: Batch) -> LossSum:
        return classification_loss(outputs, batch)

    def blocks(self) -> list[nn.Module]:
        """Return the embeddings, each layer, and each module of the head."""
        return blocks_of(self.network)

    def tensor_plan(self) -> TensorPlan | None:
        """Return the plan that transformers ships (base_model_tp_plan of the config): most decoders have one, few
        encoders do."""
        network: Any = self.network
        styles = {f"network.{name}": style for name, style in (getattr(network, "_tp_plan", None) or {}).items()}
        if not styles:
            return None
        config = network.config.get_text_config()
        heads = config.num_attention_heads
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        return TensorPlan(styles=styles, counts={"attention heads": heads, "key/value heads": key_value_heads})


def build(config: Config, spec: DataSpec) -> Model:
    """Load pretrained weights, with a new head for the data's labels; label names go into the model's config.

    Raises ModelError when the model cannot be loaded.
    """
    from transformers import AutoModelForSequenceClassification

    network, loading = _from_pretrained(
        AutoModelForSequenceClassification,
        config,
        num_labels=len(spec.labels),
        id2label=dict(enumerate(spec.labels)),
        label2id={name: number for number, name in enumerate(spec.labels)},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        attn_implementation=_attention(config),
    )
    notes = _mismatches(network, loading)
    text_config = network.config.get_text_config()
    text_config.use_cache = False  # in a decoder, a recomputed layer would append its keys twice
    if text_config.pad_token_id is None:
        pad = PretrainedTokenizer(config)
        network.config.pad_token_id = text_config.pad_token_id = pad.pad_id
        notes.append(
            f"{config.name} has no padding token: texts are padded with {pad.pad_token!r} (id {pad.pad_id}), "
            "which the model's config now names"
        )
    model = TextClassifier(network.float())
    model._lockstep_notes = tuple(notes)
    return model


def _attention(config: Config) -> str | None:
    """The implementation of attention; None for transformers' own choice.

    With dropout, PyTorch's fused attention falls back on a CPU to plain operations and more of them: steps of MiniLM in
    bf16 took 1.04 to 1.13 times as long for 24 to 256 tokens; without dropout 1.2 to 1.4 times, and 0.9 for 512.
    """
    if config.attention != "auto":
        return config.attention
    is_short = config.max_length <= SHORT and not torch.cuda.is_available()
    return "eager" if is_short else None


def _mismatches(network: Any, loading: dict[str, Any]) -> list[str]:
    """Weights of the pretrained encoder that only the model or only the checkpoint has; the head is always new."""
    prefix = f"{network.base_model_prefix}."
    missing, unexpected = (
        sorted(name for name in loading[key] if name.startswith(prefix)) for key in ("missing_keys", "unexpected_keys")
    )
    notes = []
    if missing:
        notes.append(f"the checkpoint lacks {_listing(missing)}: they start at random and are trained")
    if unexpected:
        notes.append(f"the checkpoint has {_listing(unexpected)}, for which this model has no place: they are left out")
    return notes


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more} ({len(names)} weights)"


class PretrainedTokenizer:
    """The tokenizer saved with the model. Raises ModelError when it cannot be loaded."""

    def __init__(self, config: Config) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = _from_pretrained(AutoTokenizer, config)
        if len(self.tokenizer) - len(set(self.tokenizer.all_special_ids)) < MIN_VOCABULARY:
            raise ModelError(
                f"model.name={config.name} has no tokenizer: no text would become more than special tokens. Save it "
                "beside the model, with tokenizer.save_pretrained(FOLDER)"
            )
        self.max_length = config.max_length
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.unk_token
        self.pad_token = self.tokenizer.pad_token
        self.pad_id = int(self.tokenizer.pad_token_id or 0)
        vocabulary = self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else str(self.tokenizer)
        self.key = hashlib.sha256(f"{self.max_length} {vocabulary}".encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Return token ids with special tokens, int32 [T_i] per text, T_i <= max_length; multi-threaded."""
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
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length, return_attention_mask=False)
        return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files beside the model's."""
        self.tokenizer.save_pretrained(folder)


tokenizer = PretrainedTokenizer


def save(model: TextClassifier, folder: Path) -> None:
    """Write the model with transformers' save_pretrained."""
    _silence()
    model.network.save_pretrained(folder)  # type: ignore[operator]


def read_back(folder: Path) -> Model:
    """Load what `save` wrote with plain transformers."""
    from transformers import AutoModelForSequenceClassification

    _silence()
    _check_folder(folder)
    return TextClassifier(AutoModelForSequenceClassification.from_pretrained(folder, **WITHOUT_CODE))


def save_config(model: TextClassifier, folder: Path) -> None:
    network: Any = model.network
    network.config.save_pretrained(folder)


def from_config(folder: Path) -> Model:
    """Build a model from what `save_config` wrote; its weights are random."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    _check_folder(folder)
    shape = AutoConfig.from_pretrained(folder, **WITHOUT_CODE)
    return TextClassifier(AutoModelForSequenceClassification.from_config(shape, **WITHOUT_CODE))


def _from_pretrained(auto_class: Any, config: Config, **options: Any) -> Any:
    folder = Path(config.name)
    if config.name.startswith(("/", ".", "~")) and not folder.is_dir():
        raise ModelError(f"model.name={config.name}: there is no such folder")
    _silence()
    if folder.is_dir():
        _check_folder(folder)
    origin = {"revision": config.revision, "local_files_only": folder.is_dir() or not hub_answers(), **WITHOUT_CODE}
    _check_task(config, origin)
    try:
        return auto_class.from_pretrained(config.name, **origin, **options)
    except Exception as error:  # a damaged config or tokenizer can raise anything inside the libraries
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"cannot load model.name={config.name}: {reason}\n"
            "  It is neither a local folder with config.json, weights and tokenizer files, nor a model that can be\n"
            "  fetched from the hub right now. Give a folder with model.name=PATH, or go online once: `lockstep data`\n"
            "  fetches everything a config needs."
        ) from error


def _check_task(config: Config, origin: dict[str, Any]) -> None:
    """Raise ModelError for a model that transformers has no text classifier of, such as a vision model."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    try:
        settings = AutoConfig.from_pretrained(config.name, **origin)
    except Exception:
        return  # loading the model or its tokenizer reports it
    if type(settings) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"model.name={config.name} is a {settings.model_type} model, with which transformers does not classify "
            "texts: give a model of texts, such as distilbert-base-uncased, or bring this one with model.kind=user"
        )


def _check_folder(folder: Path) -> None:
    """Raise ModelError for a config that names Python code of its own, which transformers would import, or more layers
    than can be built."""
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        try:
            settings = json.loads(storage.read(path, MAX_CONFIG_BYTES))
            has_code = "auto_map" in settings
        except (OSError, ValueError, TypeError, RecursionError):
            continue  # loading the model reports it
        if has_code:
            raise ModelError(
                f"{path} names code of its own (auto_map), which is not executed: save the model without it where "
                "transformers knows its kind, or bring it as your own file with model.kind=user"
            )
        for key, layers in _layer_counts(settings):
            if layers > MAX_LAYERS:
                raise ModelError(f"{path} asks for {layers:,} layers ({key}), more than {MAX_LAYERS:,}")


def _layer_counts(settings: Any) -> Iterator[tuple[str, int]]:
    """Yield (key, value) of every number of layers in a config, at any depth, without recursion."""
    pending = [settings]
    while pending:
        current = pending.pop()
        for key, value in current.items() if isinstance(current, dict) else ():
            if isinstance(value, int) and key.endswith(("layers", "layer")):
                yield key, value
            pending.append(value)


def _silence() -> None:
    """Turn off transformers' own warnings and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
