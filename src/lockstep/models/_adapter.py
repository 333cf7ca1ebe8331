"""Adapters: peft puts small trained matrices beside the frozen layers of a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.base import plugins
from lockstep.base.errors import ConfigError, ModelError
from lockstep.base.model_contracts import Model
from lockstep.base.name_patterns import matching
from lockstep.models._model_config import AdapterSection
from lockstep.models.objectives._choice import TAGS

NAME, BASE, PREFIX = "default", ".base_layer", "base_model.model."
"""peft's name of a single adapter, of what it replaces, and of the model in its files."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CLASSES = {"lora": "LoraConfig", "loha": "LoHaConfig", "lokr": "LoKrConfig", "ia3": "IA3Config"}
TASKS = {"classification": "SEQ_CLS", "causal_lm": "CAUSAL_LM", TAGS: "TOKEN_CLS"}


def attach(model: Model, section: AdapterSection, *, has_new_head: bool) -> None:
    """Put an adapter into a model; from then on only that, a new head and `section.train` are trained.

    Random numbers are drawn from torch's generator. Raises MissingExtra, and ConfigError for patterns that match
    nothing and options that peft refuses.
    """
    plugins.require("adapters", "peft", what="model.adapter")
    import peft

    network = _network(model)
    names, trained = [name for name, _ in network.named_parameters()], set[str]()
    if has_new_head:
        trained |= {name for name in names if not name.startswith(f"{network.base_model_prefix}.")}  # not the body
    if section.train:
        trained |= matching(section.train, names, setting="model.adapter.train")
    config = _config(section, _targets(network, section))
    weights = {name: parameter for name, parameter in network.named_parameters() if name in trained}
    try:
        peft.inject_adapter_in_model(config, network, NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"model.adapter: {str(error).splitlines()[0]}") from error
    for parameter in weights.values():
        parameter.requires_grad = True
    network.lockstep_adapter = config


def merged(model: Model) -> Model:
    """The same model with its adapter added to the weights, in place; one without an adapter is left as it is."""
    for parent, name, layer in list(_adapted(model)):
        layer.merge(safe_merge=True)
        setattr(parent, name, layer.get_base_layer())
    return model


def _adapted(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """The layers with an adapter, with their parents and names."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if callable(getattr(child, "get_base_layer", None)) and hasattr(child, "merge"):
                yield parent, name, child


def _network(model: Model) -> nn.Module:
    return getattr(model, "network", model)


def _targets(network: nn.Module, section: AdapterSection) -> list[str]:
    """Names of the layers that get an adapter. Raises ConfigError where there is none."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D) if section.kind in ("lora", "ia3") else (nn.Linear,)
    linear = [name for name, module in network.named_modules() if isinstance(module, kinds)]
    if section.targets:
        return sorted(matching(section.targets, linear, setting="model.adapter.targets"))
    inside = [name for name in linear if any(part.isdigit() for part in name.split("."))]
    if not inside:
        raise ConfigError(
            "model.adapter: the model has no linear layers in numbered blocks, such as `layers.0`: name the layers "
            "that get an adapter with model.adapter.targets"
        )
    return inside


def _config(section: AdapterSection, targets: list[str]) -> Any:
    """peft's config. Raises ConfigError."""
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
    if "megatron_config" in section.options:
        raise ConfigError("model.adapter.options: megatron_config would import a module that it names: leave it out")
    try:
        return getattr(peft, CLASSES[section.kind])(**made, **section.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.adapter.options: {error}") from error


def save_adapter(model: Model, folder: Path, *, base: str | None, objective: str) -> None:
    """Write what was trained, as peft's PeftModel.from_pretrained reads it."""
    network: Any = _network(model)
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    whole = {name for name in trained if f".{NAME}" not in name}
    config = network.lockstep_adapter
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = TASKS.get(objective)
    if config.peft_type != "IA3" or whole:
        config.modules_to_save = sorted({name.rpartition(".")[0] for name in whole}) or None
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    save_file({_file_name(name): p.detach().contiguous() for name, p in trained.items()}, folder / WEIGHTS)


def load_adapter(model: Model, folder: Path) -> None:
    """Fill what was trained from a file that `save_adapter` wrote. Raises ModelError."""
    trained = {_file_name(name): p for name, p in _network(model).named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = load_file(folder / WEIGHTS)
    wrong = sorted(found.keys() ^ trained.keys()) or [n for n in found if found[n].shape != trained[n].shape]
    if wrong:
        raise ModelError(f"{folder / WEIGHTS} is of another model: {wrong[0]} does not fit")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(found[name])


def _file_name(name: str) -> str:
    return PREFIX + name.replace(f".{NAME}", "")
