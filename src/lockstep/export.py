"""How a model leaves: written, read back by a fresh reader, compared on real samples, and only then put in place."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep import files, plugins
from lockstep.config import PluginSection, Section
from lockstep.contracts import Batch, DataSpec
from lockstep.errors import ModelError


class ExportSection(Section):
    """What `lockstep export` writes."""

    kind: Literal["pretrained", "state_dict"] = "pretrained"
    """pretrained: a folder (transformers' own layout, or safetensors with config and loader);
    state_dict: one file, the unwrapped weights as torch.save writes them."""
    file: str = Field("model.pt", pattern=r"^[\w-][\w.-]*$")
    """Name of the file for state_dict, such as distilbert_agnews.pt."""


LOADER = '''"""Loads the exported model: `python loader.py` prints it; `load()` returns it, ready to predict."""

import pathlib

from lockstep.export import load_exported


def load(folder=pathlib.Path(__file__).parent):
    """The model in evaluation mode; call it with {"image": uint8 tensor [m, C, H, W]} or what it was trained on."""
    return load_exported(folder)


if __name__ == "__main__":
    print(load())
'''


def unwrapped(model: nn.Module) -> nn.Module:
    """The network that the model wraps, where it wraps one: its names are what others expect in a state dict."""
    return getattr(model, "network", model)


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What an export needs beside the model itself."""

    rebuild: Callable[[], nn.Module]
    """Makes an untrained model of the same shape."""
    facts: Mapping[str, Any]
    """What config.json says: model, data, digest, metrics."""
    own: Any = None
    """A plugin with its own format: save(model, folder) and read_back(folder)."""
    extra: Callable[[Path], None] | None = None
    """Writes more files beside the model, such as a tokenizer's."""


def export(model: nn.Module, batch: Batch, target: Path, *, section: ExportSection, writing: Writing) -> Path:
    """Write a model into the folder `target`, which appears, or changes, only when what was read back gives the same
    outputs, bit for bit, on `batch`. Returns the folder, or the file for kind=state_dict.

    Raises ModelError when the outputs differ or the target cannot be written.
    """
    target = target.absolute()
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        if section.kind == "pretrained" and target.exists() and any(target.iterdir()) and not _is_export(target):
            raise ModelError(f"{target} holds other files and will not be replaced; name another folder with --to")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if section.kind == "state_dict":
            again = _state_dict(model, temporary / section.file, writing)
        elif writing.own is not None:
            writing.own.save(model, temporary)
            again = writing.own.read_back(temporary)
        else:
            again = _folder(model, temporary, writing)
        if writing.extra is not None:
            writing.extra(temporary)
        _compare(model, again, batch)
        return _put_in_place(temporary, target, section)
    except OSError as error:
        raise ModelError(f"cannot write the export to {target}: {error}; name another folder with --to") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _state_dict(model: nn.Module, file: Path, writing: Writing) -> nn.Module:
    torch.save(unwrapped(model).state_dict(), file)
    again = writing.rebuild()
    unwrapped(again).load_state_dict(torch.load(file, weights_only=True))
    return again


def _folder(model: nn.Module, folder: Path, writing: Writing) -> nn.Module:
    state = {  # copies, because safetensors refuses tensors that share memory, as tied weights do
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in unwrapped(model).state_dict().items()
    }
    save_file(state, folder / "model.safetensors")
    files.write(folder / "config.json", json.dumps(writing.facts, indent=1))
    files.write(folder / "loader.py", LOADER)
    again = writing.rebuild()
    unwrapped(again).load_state_dict(load_file(folder / "model.safetensors"))
    return again


def facts_of(section: PluginSection, spec: DataSpec, **more: Any) -> dict[str, Any]:
    """What an export's config.json says: enough to build the model again, and whatever else is worth knowing."""
    model = section.model_dump(mode="json")
    if "file" in model:  # a user's own code is copied beside it
        model["file"] = Path(model["file"]).name
    return {"model": model, "data": asdict(spec), **more}


def load_exported(folder: Path) -> nn.Module:
    """The model of an export folder with config.json and model.safetensors, in evaluation mode."""
    folder = Path(folder).absolute()
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "file" in facts["model"]:
        facts["model"]["file"] = folder / facts["model"]["file"]
    data = facts["data"]
    shape = tuple(data["image_shape"]) if data["image_shape"] else None
    spec = DataSpec(modality=data["modality"], labels=tuple(data["labels"]), image_shape=shape)
    plugin = plugins.find("models", facts["model"]["kind"])
    model: nn.Module = plugin.build(plugin.Config.model_validate(facts["model"]), spec)
    unwrapped(model).load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def _compare(model: nn.Module, again: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        expected: Tensor = model.eval()(batch)
        found: Tensor = again.eval()(batch)
    if not torch.equal(expected, found):
        largest = (expected - found).abs().max().item()
        raise ModelError(f"the export was read back and differs (largest difference {largest:g}); nothing was kept")


def _is_export(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _put_in_place(temporary: Path, target: Path, section: ExportSection) -> Path:
    if section.kind == "state_dict":
        target.mkdir(parents=True, exist_ok=True)
        (temporary / section.file).replace(target / section.file)
        return target / section.file
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return target
