"""Causal language models from transformers: load, build, check. m = samples, T = tokens of one, V = vocabulary."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Cache, LossSum, Model, Outputs
from lockstep.core.host.pretrained_files import untrained
from lockstep.models._documents import DOCUMENT, are_close, keeps_apart, not_apart, positions_of, visible_of
from lockstep.models._pretrained import (
    NetworkModel,
    check_vocabulary,
    from_pretrained,
    mismatches,
    position_rows,
    reported,
    resize_embeddings,
    vocabulary_of,
)
from lockstep.models.causal_lm import Config

OWN = 0.9
"""Part of the model's tokens below which a tokenizer is another model's; embeddings are padded by up to 2 %."""
FULL = "full_attention"
ROUTER = "router_loss"
"""Name among outputs and logged sums: how unevenly a mixture of experts divides the tokens of a micro-batch."""
ROUTER_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Names that models of transformers give the weight with which they add it to their loss."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def by_positions(document: Tensor) -> dict[str, Tensor]:
    """Return the positions by which transformers knows documents: it finds where they start again, and layers with a
    window count in it from the beginning of a document."""
    return {"position_ids": positions_of(document)}


def by_mask(document: Tensor) -> dict[str, Tensor]:
    """Return a mask, added to attention scores, and positions for models that do not find documents, such as OPT."""
    hidden = ~visible_of(document)
    lowest = torch.finfo(torch.bfloat16).min  # finite in fp32, too
    return {"attention_mask": hidden.float().masked_fill(hidden, lowest), **by_positions(document)}


class CausalTransformer(NetworkModel):
    """Tokens -> logits of the next ones."""

    AUTO_CLASS = "AutoModelForCausalLM"
    apart: Callable[[Tensor], dict[str, Tensor]] = staticmethod(by_positions)
    """Function that makes the arguments with which the network keeps documents apart."""
    router_weight: float = 0.0
    """Weight of the router's loss, which is a mean over the tokens of a micro-batch, in the loss of training."""
    routers: int = 0
    """Number of layers with a router."""

    def __init__(self, network: nn.Module, spec: DataSpec) -> None:
        super().__init__(network, spec)
        settings: Any = network.config
        computed = spec.context if _is_rotary(settings) else None
        self.longest = position_rows(network) or max(computed or 0, _longest(settings) or 0) or None
        self.attention_width = _attention_width(settings.get_text_config())

    def forward(self, batch: Batch) -> Outputs:
        """Tokens int64 [m, T], none of which is padding -> logits [m, T, V], in training with the router's loss where
        the model's config asks for it. Raises ModelError for too large a T."""
        tokens, document = batch["input_ids"], batch.get(DOCUMENT)
        if not torch.compiler.is_compiling():
            _check_length(self.longest, tokens.shape[1])
        more = {} if document is None else self.apart(document)
        if not self.router_weight or not self.training or self.own_loss is not None:
            return self.network(input_ids=tokens, use_cache=False, **more, **self._without_router()).logits
        outputs = self.network(input_ids=tokens, use_cache=False, **more, output_router_logits=True)
        if len(outputs.router_logits or ()) != self.routers:
            raise ModelError(
                "the model's config asks for the router's loss (output_router_logits), which is of all layers in one "
                "forward pass: set parallel.kind=ddp or fsdp and train.compile=false, or output_router_logits to false"
            )
        return {"logits": outputs.logits, ROUTER: outputs.aux_loss}

    def _without_router(self) -> dict[str, bool]:
        return {"output_router_logits": False} if self.router_weight else {}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Add the router's loss, where there is one: its mean over micro-batches, weighted by their counts."""
        found = super().loss(outputs, batch)
        if not isinstance(outputs, dict) or ROUTER not in outputs:
            return found
        router = outputs[ROUTER].float() * found.count
        return replace(
            found, total=found.total + self.router_weight * router, sums={**found.sums, ROUTER: router.detach()}
        )

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Derive figures from the tokens' loss alone."""
        return super().derived({**means, "loss": means["loss"] - self.router_weight * means.get(ROUTER, 0.0)})

    @property
    def CACHES(self) -> bool:  # type: ignore[override]
        """Whether it caches keys and values: not models that keep a state in their place, such as Mamba."""
        return not getattr(self.network, "_is_stateful", False)

    def decode(self, tokens: Tensor, mask: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        from transformers import DynamicCache

        known = DynamicCache()
        for number, (keys, values) in enumerate(cache or ()):
            known.update(keys, values, number)
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        outputs = self.network(
            input_ids=tokens,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=known,
            use_cache=True,
            **self._without_router(),
        )
        return outputs.logits[:, -1], [(layer.keys, layer.values) for layer in outputs.past_key_values.layers]


def settle_tokens(
    model: Any, *, ends: Sequence[int], bos: int | None, pad: int | None, kept: Collection[int]
) -> list[int]:
    """Name the special tokens of the data's tokenizer in the settings of a model -> all tokens that end a text. `kept`:
    those that the settings may name besides; none where the model came with another tokenizer."""
    network: Any = model.network
    every, settings = [*ends], (network.generation_config, network.config, network.config.get_text_config())
    for each in settings:
        named: Any = getattr(each, "eos_token_id", None)
        every += [id for id in (named if isinstance(named, list | tuple) else [named]) if id in kept]
    every = [*dict.fromkeys(every)]
    known = {*kept} if pad is None or pad in every else {*kept, pad}
    padding = [
        id for id in (pad, settings[0].pad_token_id, settings[1].pad_token_id) if id in known and id not in every
    ]
    if not padding and pad in every[1:] and settings[1].pad_token_id == pad:
        padding = [pad]  # as with Qwen, whose texts end with it, and answers with another token
    for each in settings:
        each.eos_token_id = every if len(every) > 1 else every[0]
        each.bos_token_id = bos if bos is not None or each.bos_token_id not in kept else each.bos_token_id
        each.pad_token_id = padding[0] if padding else None  # the embedding of a token that pads is never trained
    settings[0].pad_token_id = padding[0] if padding else every[0]
    return every


def build(config: Config, spec: DataSpec) -> Model:
    """Load a model, or draw random weights. Raises ModelError if it fails, reads ahead, or lacks tokens of the data."""
    if spec.vocabulary is None:
        raise ModelError("model.kind=causal_lm predicts tokens, but the data has none: set data.kind=text")
    network, notes = (_untrained if config.from_config else _trained)(config, spec)
    model = CausalTransformer(network.float(), spec)
    _check_causality(config, model)
    if spec.documents:
        _keep_apart(config, model, spec.vocabulary)
    if spec.context and spec.context > (known := _longest(network.config) or spec.context):
        notes.append(f"data.context={spec.context} goes beyond the {known:,} positions that {config.name} was made for")
    if getattr(network.config.get_text_config(), "output_router_logits", False):
        notes += _add_router_loss(config, model)
    model._lockstep_notes = tuple(notes)
    return model


def _add_router_loss(config: Config, model: CausalTransformer) -> list[str]:
    """Add the router's loss as the network's own class does -> a note. Raises ModelError for an unknown weight."""
    network: Any = model.network
    owners = (network, network.config, network.config.get_text_config())
    weights = [getattr(owner, name, None) for owner in owners for name in ROUTER_WEIGHTS]
    weight = next((float(each) for each in weights if each is not None), 0.0)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        plain, added = (
            network(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=wanted)
            for wanted in (False, True)
        )
    model.train()
    asks = f"the config of {config.name} asks for the router's loss (output_router_logits)"
    if (router := getattr(added, "aux_loss", None)) is None and torch.equal(plain.loss, added.loss):
        return [f"{asks}, but {type(network).__name__} of transformers adds none: training is without it"]
    if router is None or not are_close(plain.loss + weight * router, added.loss):
        raise ModelError(f"{asks}, whose weight is not known: set output_router_logits to false in its config.json")
    model.router_weight, model.routers = weight, len(added.router_logits or ())
    return [f"{asks}: it is added, of each micro-batch, {weight:g} times; evaluations are without it"]


def _trained(config: Config, spec: DataSpec) -> tuple[Any, list[str]]:
    """Load the pretrained model -> the model, and notes on it."""
    from transformers import AutoModelForCausalLM

    vocabulary = spec.vocabulary or 0

    def check(settings: Any) -> None:
        _check_fit(config, spec, settings)
        mend = "name the tokenizer that the model was trained with for data.tokenizer"
        check_vocabulary(config, settings, vocabulary, owner="the data's tokenizer has", mend=mend)

    network, loading = from_pretrained(
        AutoModelForCausalLM, config, check=check, output_loading_info=True, **_attention(config)
    )
    known, notes = vocabulary_of(network.config), [*mismatches(loading), *resize_embeddings(network, vocabulary)]
    if known is not None and vocabulary < OWN * known:
        notes.append(
            f"the model has learned {known:,} tokens, but the data's tokenizer has only {vocabulary:,}, which may mean "
            f"something else to it: data.tokenizer={config.name} is the model's own"
        )
    return network, notes


def _untrained(config: Config, spec: DataSpec) -> tuple[Any, list[str]]:
    """Build a model of the same sizes, except for the vocabulary, with random weights -> the model, and notes on it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = spec.vocabulary or 0
    settings = from_pretrained(AutoConfig, config, check=partial(_check_fit, config, spec))
    sizes, known = settings.get_text_config(), vocabulary_of(settings)
    is_own = known is not None and OWN * known <= vocabulary <= known
    for each in (settings, sizes):
        for name in SPECIAL:
            if not is_own and hasattr(each, name):
                setattr(each, name, None)  # of another tokenizer; the row of a padding token would never be trained
    sizes.vocab_size = vocabulary
    with reported(config):
        network = untrained(AutoModelForCausalLM, settings, dtype=torch.float32, **_attention(config))
    return network, []


def _attention_width(sizes: Any) -> int:
    """Compute Model.attention_width; 0 where the config lacks the sizes."""
    layers, heads, width = (
        getattr(sizes, name, 0) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not all(isinstance(number, int) for number in (layers, heads, width)):
        return 0
    return layers * (heads * size if isinstance(size := getattr(sizes, "head_dim", None), int) else width)


def _attention(config: Config) -> dict[str, str]:
    return {} if config.attention == "auto" else {"attn_implementation": config.attention}


def _longest(settings: Any) -> int | None:
    """Return the number of positions in a transformers config; None where it has none."""
    longest = getattr(settings.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def _is_rotary(settings: Any) -> bool:
    """Return whether positions are rotary, so that their number has no hard limit."""
    return bool(getattr(settings.get_text_config(), "rope_parameters", None))


def _check_length(longest: int | None, length: int) -> None:
    if longest is not None and length > longest:
        raise ModelError(
            f"the model has positions for {longest:,} tokens, but a sample of the data has {length:,}: set "
            f"data.context={longest} or less"
        )


def _check_fit(config: Config, spec: DataSpec, settings: Any) -> None:
    """Raise ModelError for a model that cannot continue texts, such as an encoder, and for samples too long for it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    is_encoder = (
        type(settings) in MODEL_FOR_MASKED_LM_MAPPING
        and not settings.is_encoder_decoder
        and not getattr(settings, "is_decoder", True)
    )
    if is_encoder or type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _not_causal(config, f"is a {settings.model_type} model, which is no causal language model")
    if spec.context is not None and not _is_rotary(settings):
        _check_length(_longest(settings), spec.context)


def _not_causal(config: Config, what: str) -> ModelError:
    return ModelError(
        f"model.name={config.name} {what}: give one that continues texts, such as openai-community/gpt2, or classify "
        "texts with model.kind=transformer"
    )


def _check_causality(config: Config, model: CausalTransformer) -> None:
    """Raise ModelError where what follows a token changes its logits, which would make a loss meaningless."""
    tokens = torch.tensor([[0, 1], [0, 2]])
    logits = model.tried_out(
        {"input_ids": tokens}, lambda why: _not_causal(config, f"cannot read tokens alone ({why})")
    )
    if logits is not None and not are_close(*logits[:, 0]):
        raise _not_causal(config, "reads texts in both directions, so it is no causal language model")


def _keep_apart(config: Config, model: CausalTransformer, vocabulary: int) -> None:
    """Find the arguments with which the network keeps documents apart. Raises ModelError where there are none, as of
    models that read with a state, such as Mamba.

    One mask for all layers would take the window from those that have one.
    """
    network: Any = model.network
    settings = network.config.get_text_config()
    kinds = {*(getattr(settings, "layer_types", None) or [FULL])}
    has_windows = getattr(settings, "sliding_window", None) or kinds != {FULL}
    for way in (by_positions,) if has_windows else (by_positions, by_mask):
        model.apart = way
        try:
            if keeps_apart(model, vocabulary=vocabulary):
                return
        except (TypeError, ValueError, RuntimeError, IndexError):  # of a model without such arguments
            continue
    raise not_apart(f"model.name={config.name}")


save, save_config = CausalTransformer.save, CausalTransformer.save_config
read_back, from_config = CausalTransformer.read_back, CausalTransformer.from_config
