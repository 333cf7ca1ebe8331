"""Weights that a model starts with: from a run, an export, or a file of weights (model.init)."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.base import storage
from lockstep.base.errors import ConfigError, ModelError, few
from lockstep.base.model_contracts import Model
from lockstep.checkpoint import layout
from lockstep.checkpoint.reader import contents, load
from lockstep.checkpoint.weights import AVERAGE, MODEL
from lockstep.core.host.remote_storage import here
from lockstep.core.numerics.digest import digest
from lockstep.recipe.run_paths import is_run, run_of
from lockstep.recipe.splits import CLASSES

ADAPTER = "adapter_config.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
OF_ADAPTERS = re.compile(r"\.(base_layer|(modules_to_save\.)?default)\.")
"""Parts of names that peft puts into a model with an adapter, some of which its files lack."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save a state dict beside other things."""


@dataclass(frozen=True)
class WarmStart:
    notes: tuple[str, ...]
    digest: str
    """Digest of the weights that were taken over."""


def warm_start(model: nn.Module, path: Path, classes: Sequence[str] = ()) -> WarmStart:
    """Copy the weights and buffers at a path that have a name and a shape of the model's, whatever the prefixes of
    wrappers, such as "module."; report the others, and where the path was trained on other classes than these. Raises
    ConfigError where there are no weights, or none fits."""
    found, own = _read(path), model.state_dict()
    is_adapter = (here(path) / ADAPTER).is_file()
    found = dict(model.renamed(found)) if isinstance(model, Model) else found
    by_name = _match_names(found, own)
    fitting = {name: found[key] for name, key in by_name.items() if found[key].shape == own[name].shape}
    if not fitting:
        raise ConfigError(
            f"model.init={path}: none of its {len(found)} weights fits the model: it has {few(found)}, "
            f"the model {few(own)}" + "; set model.adapter as it was for this adapter" * is_adapter
        )
    with torch.no_grad():
        for name, value in fitting.items():
            own[name].copy_(value)
    filled = {own[name].data_ptr() for name in fitting}
    missing = [name for name in own if own[name].data_ptr() not in filled and name not in by_name]
    if is_adapter:  # its model stays as it is
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        missing = [name for name in missing if name in trained]
    unexpected = sorted(found.keys() - set(by_name.values()))
    misshapen = [
        f"{name} ({_size(own[name])} here, {_size(found[key])} there)"
        for name, key in by_name.items()
        if name not in fitting
    ]
    notes = [f"model.init: {len(fitting)} of the model's {len(own)} weights and buffers are from {path}"]
    for what, names in (
        ("not in it, so they start as without it", missing),
        ("of another shape, so they start as without it", misshapen),
        ("in it, but not in the model", unexpected),
    ):
        notes += [f"model.init: {what}: {few(names)}"] if names else []
    if is_adapter:
        base = "an unknown model"
        with suppress(OSError, ValueError, AttributeError):  # a damaged file
            base = storage.read_json(here(path) / ADAPTER).get("base_model_name_or_path")
        notes.append(f"model.init: it is an adapter of {base}; with another model it has no meaning")
    before = _classes_at(path) or []
    if len(before) == len(classes) and before != [*classes]:  # a head of another size is not taken over
        notes.append(
            f"model.init: it was trained on the classes {few(before)}, and the data has "
            f"{few(classes)}: a head that was taken over gives each class what another has learned"
        )
    return WarmStart(tuple(notes), digest(fitting))


def _classes_at(path: Path) -> list[str] | None:
    """Return the classes of the run or export at a path, where it names them."""
    path = here(path)
    with suppress(OSError, ValueError, AttributeError):  # a folder that Lockstep has not written
        if _is_of_a_run(path):
            found = layout.read_manifest(run_of(path)[1]).numeric.get(CLASSES)
        else:
            found = storage.read_json(path / "lockstep.json").get("labels")
        return [*map(str, found)] if isinstance(found, list) else None
    return None


def _is_of_a_run(path: Path) -> bool:
    """Return whether a path is a run's folder or one of its checkpoints; an export may lie in a run's folder, too."""
    return is_run(path) and not path.is_file() and not (path / "lockstep.json").is_file()


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _match_names(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, str]:
    """Match names in the model -> at the path, by the part of the beginnings of both that fits most."""
    pairings = [
        {name: stripped[short] for name, short in _cut_prefixes(own, depth).items() if short in stripped}
        for depth in (0, 1)
        for stripped in ({short: key for key, short in _cut_prefixes(found, cut).items()} for cut in (0, 1, 2))
    ]
    return max(pairings, key=len)


def _cut_prefixes(tensors: Mapping[str, Tensor], depth: int) -> dict[str, str]:
    """Return names -> the same without their first `depth` parts, as far as all names share these."""
    names = {name: OF_ADAPTERS.sub(".", name) for name in tensors}
    for _ in range(depth):
        if len({short.partition(".")[0] for short in names.values()}) == 1:
            names = {name: short.partition(".")[2] or short for name, short in names.items()}
    return names


def _read(path: Path) -> dict[str, Tensor]:
    """Read weights and buffers at a path by name, moving averages where there are any. Raises ConfigError."""
    path = here(path)
    try:
        if _is_of_a_run(path):
            return _of_checkpoint(run_of(path)[1])
        storage.check_files(path)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) or _pickled_in(path)
        if not files:
            raise ConfigError(
                f"model.init={path}: there is no run, no export and no file of weights: give a run's folder, a folder "
                "with *.safetensors, or a file that ends in .safetensors, .pt, .pth, .bin or .ckpt"
            )
        storage.require_inside(files, path if path.is_dir() else path.resolve())
        return {name: value for file in files for name, value in _of_file(file).items()}
    except (OSError, SafetensorError, RuntimeError, ValueError, ModelError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"model.init={path} cannot be read: {reason}") from error


def _pickled_in(folder: Path) -> list[Path]:
    found = sorted(each for each in folder.glob("*") if each.suffix in PICKLED) if folder.is_dir() else []
    if len({each.suffix for each in found}) > 1 or (len(found) > 1 and not all("-of-" in each.name for each in found)):
        raise ConfigError(f"model.init={folder}: there are several files of weights in it: name one of them")
    return found


def _of_checkpoint(folder: Path) -> dict[str, Tensor]:
    stored = {name: each for name, each in contents(folder).items() if name.startswith((MODEL, AVERAGE))}
    tensors = {name: torch.empty_like(each, device="cpu") for name, each in stored.items()}
    load(folder, tensors)
    averages = {name.removeprefix(AVERAGE): value for name, value in tensors.items() if name.startswith(AVERAGE)}
    weights = {name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)}
    return weights | averages


def _of_file(file: Path) -> dict[str, Tensor]:
    """Read a file of weights, a pickled one without executing code. Raises ConfigError if it holds no state dict."""
    with storage.regular(file) as opened:
        if opened.peek(2)[:2] == b"PK":  # else of torch before 1.6, which is never compressed
            storage.check_archive(opened, file.stat().st_size)
    if file.suffix == ".safetensors":
        return load_file(file)
    if file.suffix not in PICKLED:
        raise ConfigError(f"model.init={file}: weights are in files that end in .safetensors, {', '.join(PICKLED)}")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpicklers raise anything
        raise ConfigError(
            f"model.init={file} cannot be read as a state dict without executing code in it: save "
            "model.state_dict() alone, with torch.save or safetensors"
        ) from error
    for key in WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict) or not any(isinstance(value, Tensor) for value in found.values()):
        raise ConfigError(f"model.init={file} holds no state dict, which maps names to tensors")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
