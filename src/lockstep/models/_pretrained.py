"""Common part of transformers' models: load them without code of their own, check, split, save, read back."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lockstep.base.contracts import DataSpec, samples_of
from lockstep.base.errors import LockstepError, ModelError, few
from lockstep.base.model_contracts import Batch, Model, TensorPlan
from lockstep.core.host.pretrained_files import load, untrained
from lockstep.core.modules.blocks import blocks_of
from lockstep.core.modules.deferred_init import is_fake
from lockstep.models._model_config import PretrainedSection, TokensSection
from lockstep.models.objectives._choice import ObjectiveModel, name_of, width_of

PROBLEM_TYPES = {"regression": "regression", "multilabel": "multi_label_classification"}
"""Names of objectives in transformers' pipelines; the others follow from the labels."""
POSITIONS = ("position_embeddings", "embed_positions", "wpe", "positions_embed")
"""Attribute names of tables of learned positions."""


class NetworkModel(ObjectiveModel):
    """Adapter from a transformers model (`network`) to Lockstep's Model; its files have the form of transformers."""

    AUTO_CLASS: ClassVar[str]
    """Name of the class of transformers that loads the network."""
    PROCESSOR: ClassVar[type[Any] | None] = None
    """Class of what makes its inputs of an image or a sound, by the name or the folder of the model."""
    processor: Any = None

    def __init__(self, network: nn.Module, spec: DataSpec) -> None:
        super().__init__(spec)
        self.network = network

    @classmethod
    def of(cls, network: nn.Module, spec: DataSpec, name: str) -> Self:
        """Make the model of a network of this name, or in this folder, with its processor, if it has one."""
        model = cls(network, spec)
        model.processor = cls.PROCESSOR(name) if cls.PROCESSOR else None
        return model

    @classmethod
    def auto_class(cls, spec: DataSpec | None) -> Any:
        """Return the class that loads the network, with a head for the objective."""
        import transformers

        return getattr(transformers, cls.AUTO_CLASS)

    def save(self, folder: Path) -> None:
        """Write the model, and its processor if it has one, with transformers' save_pretrained."""
        silence()
        self.network.save_pretrained(folder)  # type: ignore[operator]
        if self.processor is not None:
            self.processor.save(folder)

    def save_config(self, folder: Path) -> None:
        """Write only the config.json of the model, and its processor."""
        network: Any = self.network
        network.config.save_pretrained(folder)
        if self.processor is not None:
            self.processor.save(folder)

    @classmethod
    def read_back(cls, folder: Path, spec: DataSpec) -> Model:
        """Load what `save` wrote with plain transformers."""
        silence()
        return cls.of(load(cls.auto_class(spec), folder), spec, str(folder))

    @classmethod
    def from_config(cls, folder: Path, spec: DataSpec) -> Model:
        """Build a model from what `save_config` wrote; its weights are random."""
        from transformers import AutoConfig

        return cls.of(untrained(cls.auto_class(spec), load(AutoConfig, folder)), spec, str(folder))

    def blocks(self) -> list[nn.Module]:
        """Return the embeddings, each layer, and each module of the head."""
        return blocks_of(self.network)

    def tried_out(self, batch: Batch, problem: Callable[[str], ModelError]) -> Any:
        """Return outputs in evaluation, without gradients; None for weights without memory (deferred_init), which give
        none. Raises the problem with the reason why there are none."""
        if any(map(is_fake, self.parameters())):
            return None
        self.eval()
        try:
            with torch.no_grad():
                outputs = self(batch)
        except Exception as error:  # of any module
            raise problem(next(iter(str(error).splitlines()), "") or type(error).__name__) from error
        self.train()
        return outputs

    def tensor_plan(self) -> TensorPlan | None:
        """Return the plan that transformers ships (base_model_tp_plan): most decoders have one, few encoders do."""
        network: Any = self.network
        styles = {f"network.{name}": style for name, style in (getattr(network, "_tp_plan", None) or {}).items()}
        if not styles:
            return None
        config = network.config.get_text_config()
        heads = config.num_attention_heads
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        return TensorPlan(styles=styles, counts={"attention heads": heads, "key/value heads": key_value_heads})


def position_rows(network: Any) -> int | None:
    """Return the number of learned positions: rows of the table less its offset (RoBERTa, OPT); None without a
    table."""
    tables = [module for name, module in network.named_modules() if name.rpartition(".")[2] in POSITIONS]
    found = [
        len(table.weight) - (getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
        if hasattr(table, "padding_idx")
    ]
    named = getattr(network.config.get_text_config(), "max_position_embeddings", None) if found else None
    return min([*found, *([named] if named else [])], default=None)


def from_pretrained(auto_class: Any, config: PretrainedSection, *, check: Callable[[Any], None], **options: Any) -> Any:
    """Load with an auto class of transformers; `check` gets its transformers config before. Raises ModelError."""
    from transformers import AutoConfig

    silence()
    try:
        settings = load(AutoConfig, config.name, revision=config.revision)
    except Exception:
        settings = None  # loading the model or its tokenizer reports it
    if settings is not None:
        check(settings)
    with reported(config):
        return load(auto_class, config.name, revision=config.revision, **options)


def with_new_head(auto_class: Any, config: PretrainedSection, spec: DataSpec, **options: Any) -> tuple[Any, list[str]]:
    """Load a pretrained classifier with a new head for the data's targets, whose names go into the model's config ->
    the model, and notes on its weights. Raises ModelError."""
    names, before = dict(enumerate(spec.labels or spec.numbers)), dict[int, str]()

    def check(settings: Any) -> None:
        check_task(auto_class, config, settings)
        before.update(getattr(settings, "id2label", None) or {})

    network, loading = from_pretrained(
        auto_class,
        config,
        check=check,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        num_labels=width_of(spec),
        id2label=names,
        label2id={name: number for number, name in names.items()},
        problem_type=PROBLEM_TYPES.get(name_of(spec)),
        **options,
    )
    notes = mismatches(loading, prefix=f"{network.base_model_prefix}.")
    resized = {key for key, *_ in loading["mismatched_keys"]}
    if any(not key.startswith(f"{network.base_model_prefix}.") for key in resized):
        return network, [*notes, _other_head([*before.values()])]
    new = {*loading["missing_keys"], *resized}
    return network, [*notes, *_rows_by_name(network, [*before.values()], [*names.values()], new=new)]


def _rows_by_name(network: Any, before: list[str], names: list[str], *, new: set[str]) -> list[str]:
    """Reorder the rows of a trained head by the names of its classes, or replace a head of other classes -> a note."""
    inner, rows = f"{network.base_model_prefix}.", len(names)
    last = {name: p for name, p in network.named_parameters() if not name.startswith(inner) and len(p) == rows}
    is_unnamed = before == [f"LABEL_{n}" for n in range(rows)]
    if is_unnamed and sorted(before) != sorted(names):  # class n of data whose classes are numbers
        before = [str(n) for n in range(rows)]
    if before == names or new & last.keys() or not last:
        return []
    layers = {name.rpartition(".")[0] for name in last}
    if sorted(before) == sorted(names) and len(set(names)) == rows and len(layers) == 1:
        order = [before.index(name) for name in names]
        with torch.no_grad():
            for parameter in last.values():
                parameter.copy_(parameter[order])
        return ["the checkpoint has its classes in another order: the rows of its head follow their names"]
    if rows == 1:  # a number of another name: there is no other output that it could be
        found = "one unnamed output" if is_unnamed else before[0]
        return [f"the checkpoint has a head for {found}, which is taken over for {names[0]!r}"]
    given = [f"LABEL_{n}" for n in range(rows)] if is_unnamed else before
    _initialize(network, last)
    return [_other_head(given)]


def _other_head(before: list[str]) -> str:
    is_unnamed = before == [f"LABEL_{n}" for n in range(len(before))]
    found = f"{len(before)} unnamed" if is_unnamed else few(before)
    return (
        f"the checkpoint has a head for other classes ({found}) than the data: a new head is trained. To continue with "
        "the trained one, give the data the same classes, and name them in the checkpoint's config.json (id2label and "
        "label2id) as the data does"
    )


def _initialize(network: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Draw new values for the parameters of some layers, as transformers does for missing ones."""
    for parameter in parameters.values():
        parameter._is_hf_initialized = False  # type: ignore[attr-defined]
    with torch.no_grad():
        for layer in dict.fromkeys(name.rpartition(".")[0] for name in parameters):
            network._init_weights(network.get_submodule(layer))


def check_task(auto_class: Any, config: PretrainedSection, settings: Any) -> None:
    """Raise ModelError for a model for which transformers has no classifier of such samples, or of words."""
    if type(settings) not in auto_class._model_mapping:
        samples, example = samples_of(config.modality), type(config).model_fields["name"].default
        what = "words" if "Token" in auto_class.__name__ else samples
        raise ModelError(
            f"model.name={config.name} is a {settings.model_type} model, with which transformers does not classify "
            f"{what}: give a model of {samples}, such as {example}, or bring this one with model.kind=user"
        )


def vocabulary_of(settings: Any) -> int | None:
    """Return the vocabulary size in a transformers config, None where it has none."""
    return getattr(settings.get_text_config(), "vocab_size", None)


def check_vocabulary(config: TokensSection, settings: Any, tokens: int, *, owner: str, mend: str) -> None:
    """Raise ModelError for a tokenizer with more tokens than the model has embeddings, unless these are resized."""
    known = vocabulary_of(settings)
    if known is not None and known < tokens and not config.resize_embeddings:
        raise ModelError(
            f"model.name={config.name} has embeddings of {known:,} tokens, but {owner} {tokens:,}: set "
            f"model.resize_embeddings=true, which adds the rows that lack, or {mend}"
        )


def resize_embeddings(network: Any, tokens: int) -> list[str]:
    """Add rows for missing tokens to the embeddings, and to the output layer of a language model -> a note.

    Random numbers are drawn from torch's generator, around the mean of the known rows, which leaves the probabilities
    of these nearly as they are. Source: J. Hewitt, Initializing new word embeddings for pretrained language models,
    2021.
    """
    known = network.get_input_embeddings().weight.shape[0]
    if known >= tokens:
        return []
    network.resize_token_embeddings(tokens, mean_resizing=False)
    layers = (network.get_input_embeddings(), network.get_output_embeddings())
    weights = {layer.weight: None for layer in layers if layer is not None}  # once where they are tied
    biases = [bias for layer in layers if (bias := getattr(layer, "bias", None)) is not None]
    with torch.no_grad():
        for weight in weights:
            rows = weight[:known].float()
            weight[known:] = rows.mean(0) + rows.std(0) * torch.randn(tokens - known, rows.shape[1])
        for bias in biases:
            bias[known:] = bias[:known].mean()
    return [f"the embeddings have rows for {known:,} tokens: {tokens - known:,} are added, and begin at random"]


@contextmanager
def reported(config: PretrainedSection) -> Iterator[None]:
    """Turn any error while a model is loaded into a ModelError."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:  # a damaged config or tokenizer can raise anything inside the libraries
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        if Path(config.name).is_dir():
            mend = "the folder needs whole files: config.json, weights (model.safetensors) and those of the tokenizer"
        else:
            mend = (
                "it is no folder here, and it could not be fetched from the hub: correct the name, or go online once; "
                "`lockstep data CONFIG` fetches everything that a config needs"
            )
        raise ModelError(f"cannot load model.name={config.name} ({reason}): {mend}") from error


def mismatches(loading: dict[str, Any], prefix: str = "") -> list[str]:
    """Describe weights with this prefix that only the model or only the checkpoint has, by transformers' report."""
    missing, unexpected = (
        sorted(name for name in loading[key] if name.startswith(prefix)) for key in ("missing_keys", "unexpected_keys")
    )
    texts = (
        ("the checkpoint lacks {}: they start at random and are trained", missing),
        ("the checkpoint has {}, for which this model has no place: they are left out", unexpected),
    )
    return [text.format(f"{few(names)} ({len(names)} weights)") for text, names in texts if names]


def silence() -> None:
    """Turn off transformers' own warnings and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
