"""Adapters: peft puts small trained matrices beside the frozen layers of a model."""

import copy
import json
import re
import warnings
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.base import plugins
from lockstep.base.errors import ConfigError, ModelError
from lockstep.base.model_contracts import Model
from lockstep.base.name_patterns import matching
from lockstep.core.host.pretrained_files import add_adapter, read_adapter
from lockstep.core.numerics.digest import digest_of, line
from lockstep.models._model_config import AdapterSection
from lockstep.models.objectives._choice import TAGS

NAME, BASE, PREFIX = "default", ".base_layer", "base_model.model."
"""peft's names: of a single adapter, of the layer beside it, and of the model in its files."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of LoRA's init_lora_weights that change the weights beside it, too."""
CLASSES = {"lora": "LoraConfig", "loha": "LoHaConfig", "lokr": "LoKrConfig", "ia3": "IA3Config"}
WITHOUT_EFFECT = re.compile(
    "^_|dropout|pdrop|initializer|dtype$|_token_id$|^output_|^return_dict|^use_cache$|^(id2label|label2id|num_labels|"
    "problem_type|architectures|auto_map|transformers_version|name_or_path)$"
)
"""Settings of a network that do not change its outputs in evaluation, or that a run sets itself."""
ALL_LINEAR = "all-linear"
TASKS = {"classification": "SEQ_CLS", "causal_lm": "CAUSAL_LM", TAGS: "TOKEN_CLS"}


def attach(model: Model, section: AdapterSection, *, has_new_head: bool) -> None:
    """Put an adapter into a model; from then on only that, a new head and `section.train` are trained.

    Random numbers are drawn from torch's generator. Raises MissingExtra, and ConfigError for patterns that match
    nothing and options that peft refuses.
    """
    plugins.require("adapters", "peft", what="model.adapter")
    import peft

    network, options = _network(model), dict(section.options)
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    trained = matching(section.train, names, setting="model.adapter.train")
    ends = [f"*{end}" for end in options.pop("modules_to_save", None) or ()]  # so peft finds them
    trained |= matching(ends, names, setting="model.adapter.options.modules_to_save")
    if has_new_head:
        trained |= {name for name in names if not name.startswith(f"{network.base_model_prefix}.")}  # not the body
    whole = {network.get_parameter(name) for name in trained}
    targets = _targets(network, section, whole)
    config = _config(section, options, targets)
    is_transposed = any(type(network.get_submodule(name)).__name__ == "Conv1D" for name in targets)
    if is_transposed and options.get("init_lora_weights") == "olora":  # which peft would transpose wrongly
        raise ConfigError(
            "model.adapter.options: init_lora_weights=olora does not fit the transposed layers (Conv1D) of GPT-2: set "
            "pissa, or leave it out"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # that what is tied is saved in another way: see save_adapter
            peft.inject_adapter_in_model(config, network, NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"model.adapter: {str(error).splitlines()[0]}") from error
    for parameter in whole:
        parameter.requires_grad = True


def merged(model: Model) -> Model:
    """Return a copy with the adapter added to the weights, which shares the memory of all others; a model without an
    adapter is returned as it is.

    A weight with an adapter that is tied to another, such as a head's to the embeddings, is untied.
    """
    if not any(_adapted(model)):
        return model
    made = copy.deepcopy(model, {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()})
    for parent, name, layer in list(_adapted(made)):
        base = layer.get_base_layer()
        if len(_names(made).get(getattr(base, "weight", None), ())) > 1:
            base.weight = nn.Parameter(base.weight.data, requires_grad=False)
            settings: Any = _network(made).config
            settings.tie_word_embeddings = settings.get_text_config().tie_word_embeddings = False
        layer.merge(safe_merge=True)
        setattr(parent, name, layer.get_base_layer())
    return made


def _names(network: nn.Module) -> dict[Any, list[str]]:
    """Return the names of each parameter, several of one that is tied."""
    found: dict[Any, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def _adapted(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the layers with an adapter, with their parents and names."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if callable(getattr(child, "get_base_layer", None)) and hasattr(child, "merge"):
                yield parent, name, child


def _network(model: Model) -> nn.Module:
    return getattr(model, "network", model)


def _targets(network: nn.Module, section: AdapterSection, whole: set[nn.Parameter]) -> list[str]:
    """List the layers that get an adapter: none whose weight is trained as a whole. Raises ConfigError without any."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D) if section.kind in ("lora", "ia3") else (nn.Linear,)
    linear = [name for name, each in network.named_modules() if isinstance(each, kinds) and each.weight not in whole]
    if section.targets:
        chosen = [name for each in section.targets for name in _matching_layers(each, linear, network)]
        return sorted(matching(chosen, linear, setting="model.adapter.targets"))
    inside = [name for name in linear if any(part.isdigit() for part in name.split("."))]
    if not inside:
        raise ConfigError(
            "model.adapter: the model has no linear layers in numbered blocks, such as `layers.0`: name the layers "
            "that get an adapter with model.adapter.targets"
        )
    return inside


def _matching_layers(target: str, linear: list[str], network: Any) -> list[str]:
    """List the layers that a target of peft stands for: all but the head, the end of a name, or a regular expression;
    else the target itself, which may be a pattern as of other settings."""
    if target == ALL_LINEAR:
        head = getattr(network, "get_output_embeddings", lambda: None)()
        return [name for name in linear if network.get_submodule(name) is not head]
    if ends := [name for name in linear if f".{target}." in f".{name}."]:
        return ends
    try:
        return [name for name in linear if re.fullmatch(target, name)] or [target]
    except re.error:
        return [target]


def _config(section: AdapterSection, options: dict[str, Any], targets: list[str]) -> Any:
    """Make peft's config, with further options. Raises ConfigError."""
    import peft

    made: dict[str, Any] = {"target_modules": targets}
    if section.kind != "ia3":
        made |= {"r": section.rank}
        made |= {("lora_alpha" if section.kind == "lora" else "alpha"): section.alpha or 2 * section.rank}
    elif section.alpha is not None:
        raise ConfigError("model.adapter: ia3 has no alpha")
    else:
        made["feedforward_modules"] = []
    if section.dropout and section.kind != "lora":
        raise ConfigError(f"model.adapter: {section.kind} has no dropout")
    if section.kind == "lora":
        made["lora_dropout"] = section.dropout
    if "megatron_config" in options:
        raise ConfigError("model.adapter.options: megatron_config would import a module that it names: leave it out")
    try:
        return getattr(peft, CLASSES[section.kind])(**made, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.adapter.options: {error}") from error


def save_adapter(model: Model, folder: Path, *, base: str | None, revision: str | None, objective: str) -> None:
    """Write the trained weights, as peft reads them beside the model `base`."""
    network: Any = _network(model)
    config, state = _trained(network)
    config.base_model_name_or_path, config.revision, config.inference_mode = base, revision, True
    config.task_type = TASKS.get(objective) if hasattr(network, "base_model_prefix") else None
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    save_file({PREFIX + name: each.detach().clone() for name, each in state.items()}, folder / WEIGHTS)


def _trained(network: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return peft's config, and the trained weights by peft's names: the adapter, and modules as a whole."""
    config, modules = copy.deepcopy(network.peft_config[NAME]), []
    state = _adapter_weights(network)
    for parameter, names in _names(network).items():
        if not parameter.requires_grad or any(f".{NAME}" in name or name in state for name in names):
            continue
        owners = [owner for name in names if (owner := _outermost(network, name))]
        if not owners:  # peft loads it by its name
            state[names[0]] = parameter
        elif len(owners) > 1 and hasattr(config, "ensure_weight_tying"):
            config.ensure_weight_tying = True
        modules += owners[:1] if getattr(config, "ensure_weight_tying", False) else owners
        for owner in owners:
            inner = network.get_submodule(owner).state_dict()
            state |= {f"{owner}.{key}": value for key, value in inner.items()}
    config.modules_to_save = sorted({*modules}) or None
    return config, state


def base_digest(model: Model) -> str:
    """Return the hex sha256 of the weights beside which an adapter was trained, without those that it has changed.
    Names of weights differ by version, so the places of equal shapes count instead."""
    network = _network(model)
    return _digest_beside(network, *_trained(network))


def _digest_beside(network: nn.Module, config: Any, names: Container[str]) -> str:
    """Return the hex sha256 of the weights that an adapter's file lacks."""
    begins = str(getattr(config, "init_lora_weights", ""))
    changed = {layer.get_base_layer() for *_, layer in _adapted(network)} if begins.startswith(CHANGING) else set()
    left_out = {p for layer in changed for p in layer.parameters()}
    kept = (
        parameter
        for parameter, own in _names(network).items()
        if parameter not in left_out and not any(f".{NAME}" in name or name in names for name in own)
    )
    return digest_of(line(str(number), parameter) for number, parameter in enumerate(kept))


def base_settings(model: Model) -> dict[str, Any]:
    """Return the settings of the network beside which an adapter was trained."""
    config: Any = getattr(_network(model), "config", None)
    return json.loads(config.to_json_string(use_diff=False)) if hasattr(config, "to_json_string") else {}


def _changed_setting(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first setting that differs, of those with an effect that both versions of transformers have."""
    for key in sorted(key for key in before.keys() & now.keys() if not WITHOUT_EFFECT.search(key)):
        one, other = before[key], now[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if inner := _changed_setting(one, other):
                return f"{key}.{inner}"
        elif one != other:
            return f"{key} was {one!r} and is {other!r}"
    return None


def _adapter_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's weights, and biases that peft trains with it, by the names of its files."""
    import peft

    return peft.get_peft_model_state_dict(network, network.state_dict(), adapter_name=NAME, save_embedding_layers=False)


def _outermost(network: nn.Module, name: str) -> str | None:
    """Return the largest module with a parameter in which all are trained and none is an adapter's: peft saves those,
    and a classifier's head only as a whole. None where that is the network itself, or a layer with an adapter."""
    owner = name.rpartition(".")[0]
    if not owner or BASE in owner:
        return None
    while outer := owner.rpartition(".")[0]:
        inside = network.get_submodule(outer)
        if any(_adapted(inside)) or not all(p.requires_grad for p in inside.parameters()):
            break
        owner = outer
    return owner


def load_adapter(model: Model, folder: Path, *, digest: str, settings: Mapping[str, Any]) -> None:
    """Put the adapter in a folder into the model that it belongs to, as peft does. Raises ModelError, also where
    `base_digest` or `base_settings` are known and differ."""
    now = base_settings(model)
    config, names = _add(_network(model), folder)  # peft may write to the settings
    if change := _changed_setting(settings, now):
        raise ModelError(
            f"the adapter was trained beside a model with other settings: in its config.json, {change}. Restore it, or "
            "name the folder of the model that it was trained beside with --base"
        )
    if digest and digest != _digest_beside(_network(model), config, names):
        raise ModelError(
            "the adapter was trained beside other weights than those of this model, which has changed, or is another: "
            "name the folder of the model that it was trained beside with --base"
        )


def _add(network: Any, folder: Path) -> tuple[Any, set[str]]:
    """Put a folder's adapter into a network -> peft's config, and the names of its weights. Raises ModelError."""
    from peft.utils.other import ModulesToSaveWrapper

    try:
        with warnings.catch_warnings(action="ignore"):
            config = read_adapter(folder)
            if type(config).__name__ not in CLASSES.values():
                raise ModelError(f"{folder / CONFIG} is of {type(config).__name__}, which Lockstep does not train")
            add_adapter(network, folder, config)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder / WEIGHTS} is of another model: {reason}") from error
    with safe_open(folder / WEIGHTS, "pt") as file:
        found = {*file.keys()}
    state = _adapter_weights(network)
    for parent in [*network.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, ModulesToSaveWrapper):
                setattr(parent, name, child.modules_to_save[NAME])
    known = {PREFIX + name for name in (*state, *network.state_dict())}
    if wrong := sorted({PREFIX + name for name in state} - found) or sorted(found - known):
        raise ModelError(f"{folder / WEIGHTS} is of another model: {wrong[0]} does not fit")
    return config, {name.removeprefix(PREFIX) for name in found}
