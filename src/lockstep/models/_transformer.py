"""Models and tokenizers of transformers: loaded, checked, saved."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
"""Else transformers asks on a terminal whether it may import what a model's config.json names."""

MOST_BYTES = 64 << 20
"""Of a model's or tokenizer's config."""


class TextClassifier(Model):
    """A transformers model under Lockstep's contract; `network` is the model itself."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        """Token ids and mask, int64 [m, T] -> logits [m, classes]."""
        return self.network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def loss(self, outputs: Tensor, batch: Batch) -> LossSum:
        return classification_loss(outputs, batch)

    def blocks(self) -> list[nn.Module]:
        """The embeddings, each layer, and each part of the head."""
        return blocks_of(self.network)

    def tensor_plan(self) -> TensorPlan | None:
        """The plan that transformers ships for it (base_model_tp_plan of its config), for few encoders but for most
        decoders."""
        network: Any = self.network
        styles = {f"network.{name}": style for name, style in (getattr(network, "_tp_plan", None) or {}).items()}
        if not styles:
            return None
        config = network.config.get_text_config()
        heads = config.num_attention_heads
        grouped = getattr(config, "num_key_value_heads", None) or heads
        return TensorPlan(styles=styles, counts={"attention heads": heads, "key/value heads": grouped})


def build(config: Config, spec: DataSpec) -> Model:
    """The pretrained weights with a fresh head for the data's labels, whose names travel in the model's config.

    Raises ModelError when the name cannot be loaded.
    """
    from transformers import AutoModelForSequenceClassification

    network, loading = _loaded(
        AutoModelForSequenceClassification,
        config,
        num_labels=len(spec.labels),
        id2label=dict(enumerate(spec.labels)),
        label2id={name: number for number, name in enumerate(spec.labels)},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    notes = _unfit(network, loading)
    text_config = network.config.get_text_config()
    text_config.use_cache = False  # of decoders: a recomputed layer would add its keys twice
    if text_config.pad_token_id is None:
        tokens = PretrainedTokenizer(config)
        network.config.pad_token_id = text_config.pad_token_id = tokens.pad_id
        notes.append(
            f"{config.name} has no padding token: texts are padded with {tokens.pad_token!r} (id {tokens.pad_id}), "
            "which the model's config now names"
        )
    model = TextClassifier(network.float())
    model._lockstep_notes = tuple(notes)
    return model


def _unfit(network: Any, loading: dict[str, Any]) -> list[str]:
    """What of the pretrained part the checkpoint lacks, or holds without a place for it; a head is always new."""
    prefix, found = f"{network.base_model_prefix}.", []
    missing = sorted(name for name in loading["missing_keys"] if name.startswith(prefix))
    unexpected = sorted(name for name in loading["unexpected_keys"] if name.startswith(prefix))
    if missing:
        found.append(f"the checkpoint lacks {_some(missing)}: they start at random and are trained")
    if unexpected:
        found.append(f"the checkpoint has {_some(unexpected)}, for which this model has no place: they are left out")
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more} ({len(names)} weights)"


MOST_LAYERS = 10_000

LEAST_TOKENS = 3
"""Beside the special ones; where there are no files, transformers makes up a tokenizer of 0 to 2."""

NAMED = 3
"""Of many weights so many are named."""

CHARACTERS = 64
"""Of a long text, so many for each token that is read are tokenised at first; mostly there are five to a token."""


class PretrainedTokenizer:
    """The tokenizer that belongs to the model."""

    def __init__(self, config: Config) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = _loaded(AutoTokenizer, config)
        if len(self.tokenizer) - len(set(self.tokenizer.all_special_ids)) < LEAST_TOKENS:
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
        """Token ids with the model's special tokens, int32 [T_i] per text, T_i <= max_length; in parallel."""
        starts = [self._start(text) for text in texts]
        found = self._ids(starts)
        for number, text in enumerate(texts):
            if len(starts[number]) < len(text) and len(found[number]) < self.max_length:
                (found[number],) = self._ids([text])
        return found

    def _start(self, text: str) -> str:
        """Whole words of a long text, mostly more than are read: megabytes would take seconds."""
        most = CHARACTERS * self.max_length
        if len(text) <= most or self.tokenizer.truncation_side != "right":
            return text
        end = max(text.rfind(space, 0, most) for space in (" ", "\n"))
        return text[:end].rstrip() if end > 0 else text

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_length, return_attention_mask=False)
        return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files beside the model's."""
        self.tokenizer.save_pretrained(folder)


def tokenizer(config: Config) -> PretrainedTokenizer:
    """The tokenizer for a config; raises ModelError when it cannot be loaded."""
    return PretrainedTokenizer(config)


def save(model: TextClassifier, folder: Path) -> None:
    """Write the model the way transformers reads it."""
    _quiet()
    model.network.save_pretrained(folder)  # type: ignore[operator]


def read_back(folder: Path) -> Model:
    """Read what `save` has written, with plain transformers."""
    from transformers import AutoModelForSequenceClassification

    _quiet()
    _check_folder(str(folder))
    return TextClassifier(AutoModelForSequenceClassification.from_pretrained(folder, **WITHOUT_CODE))


def save_config(model: TextClassifier, folder: Path) -> None:
    network: Any = model.network
    network.config.save_pretrained(folder)


def from_config(folder: Path) -> Model:
    """A model of the shape that `save_config` has written, with weights that mean nothing."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    _check_folder(str(folder))
    shape = AutoConfig.from_pretrained(folder, **WITHOUT_CODE)
    return TextClassifier(AutoModelForSequenceClassification.from_config(shape, **WITHOUT_CODE))


def _loaded(kind: Any, config: Config, **options: Any) -> Any:
    if config.name.startswith(("/", ".", "~")) and not Path(config.name).is_dir():
        raise ModelError(f"model.name={config.name}: there is no such folder")
    _quiet()
    cached_only = Path(config.name).is_dir() or not hub_answers()
    if Path(config.name).is_dir():
        _check_folder(config.name)
    options |= WITHOUT_CODE
    _refuse_other_tasks(config, cached_only=cached_only)
    try:
        return kind.from_pretrained(config.name, revision=config.revision, local_files_only=cached_only, **options)
    except Exception as error:  # what a damaged config or tokenizer raises inside of the libraries
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"cannot load model.name={config.name}: {reason}\n"
            "  It is neither a local folder with config.json, weights and tokenizer files, nor a model that can be\n"
            "  fetched from the hub right now. Give a folder with model.name=PATH, or go online once: `lockstep data`\n"
            "  fetches everything a config needs."
        ) from error


def _refuse_other_tasks(config: Config, *, cached_only: bool) -> None:
    """Raise ModelError for a model that transformers does not classify texts with, such as one of images."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            config.name, revision=config.revision, local_files_only=cached_only, **WITHOUT_CODE
        )
    except Exception:  # as many kinds as there are settings
        return  # reading the model or its tokenizer says what is wrong
    if type(found) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"model.name={config.name} is a {found.model_type} model, with which transformers does not classify texts: "
            "give a model of texts, such as distilbert-base-uncased, or bring this one with model.kind=user"
        )


def _check_folder(folder: str) -> None:
    """Raise ModelError for a model folder whose files name Python code of its own, which transformers would import, or
    more layers than could be built in a day."""
    for name in ("config.json", "tokenizer_config.json"):
        try:
            facts = json.loads(storage.read(Path(folder, name), MOST_BYTES))
            has_code = "auto_map" in facts
        except (OSError, ValueError, TypeError, RecursionError):
            continue  # reading the model says what is wrong
        if has_code:
            raise ModelError(
                f"{Path(folder, name)} names code of its own (auto_map), which is not executed: save the model without "
                "it where transformers knows its kind, or bring it as your own file with model.kind=user"
            )
        for key, number in _numbers_of_layers(facts):
            if number > MOST_LAYERS:
                raise ModelError(f"{Path(folder, name)} asks for {number:,} layers ({key}), more than {MOST_LAYERS:,}")


def _numbers_of_layers(facts: Any) -> Iterator[tuple[str, int]]:
    """Key and value of each such number in a config, at any depth."""
    left = [facts]
    while left:
        found = left.pop()
        for key, value in found.items() if isinstance(found, dict) else ():
            if isinstance(value, int) and key.endswith(("layers", "layer")):
                yield key, value
            left.append(value)


def _quiet() -> None:
    """No warnings and progress bars of transformers' own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
