"""Reads and writes weights, and rebuilds the model that they belong to."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.base import plugins, storage
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model
from lockstep.inference.export.export_facts import ExportFacts, file_in
from lockstep.models._model_config import ModelSection
from lockstep.models._own_functions import with_own_loss

FILE = "model.safetensors"
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = tuple(TORCH_DTYPES)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the wrapped network, if any: its parameter names are those that others expect in a state dict."""
    return getattr(model, "network", model)


def section_of(facts: ExportFacts, folder: Path, *, is_adapter: bool = False) -> tuple[Any, ModelSection]:
    """Return a model's plugin and section; paths are in the folder, save an adapter's base model. Raises ModelError."""
    plugin = plugins.implementation("models", facts.model["kind"])
    section = dict(facts.model)
    if "file" in section:
        section["file"] = file_in(folder, section["file"])
    if plugin.Config.TAKES_TOKENS and not is_adapter:
        section["name"] = str(folder)
    return plugin, plugin.Config.model_validate(section)


def rebuilt(facts: ExportFacts, folder: Path) -> Model:
    """Build the untrained model in the export's dtype, in evaluation mode; a float64 model counts as fp32. Raises
    ModelError for one larger than the file of its weights, before it takes memory: settings may be untrusted."""
    plugin, section = section_of(facts, folder)
    from_config = plugins.hook("models", facts.model["kind"], "from_config")

    def built() -> Model:
        return from_config(folder, facts.spec) if from_config else plugin.build(section, facts.spec)

    if section.code is None:  # a user's own build() may do anything
        with torch.device("meta"):
            check_parameter_count(built(), [folder / facts.file])
    model = with_own_loss(built(), section)
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    return (model if is_double and facts.dtype == "fp32" else model.to(TORCH_DTYPES[facts.dtype])).eval()


def check_parameter_count(model: nn.Module, weights: Iterable[Path]) -> None:
    """Raise ModelError for a model with more parameters than these files have bytes."""
    count, size = sum(p.numel() for p in model.parameters()), 0
    for path in weights:
        with storage.regular(path) as file:  # not a FIFO
            size += os.fstat(file.fileno()).st_size
    if count > size:
        raise ModelError(f"its settings are of a model with {count:,} numbers, but its weights have {size:,} bytes")


def save_config(model: Model, facts: ExportFacts, folder: Path) -> None:
    """Write what `rebuilt` needs besides the facts, for models that are not fully described by their section."""
    if save := plugins.hook("models", facts.model["kind"], "save_config"):
        save(model, folder)


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """Write safetensors, of copies: it refuses tensors that share memory, such as tied weights."""
    state = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in unwrapped(model).state_dict().items()
    }
    save_file(state, folder / FILE)
    save_config(model, facts, folder)


def read(folder: Path, facts: ExportFacts) -> Model:
    storage.regular(folder / FILE).close()  # not a FIFO
    model = rebuilt(facts, folder)
    unwrapped(model).load_state_dict(load_file(folder / FILE))
    return model
