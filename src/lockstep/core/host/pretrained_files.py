"""Load what transformers has saved, or what it fetches from the hub, without any code that comes with it."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from lockstep.base import storage
from lockstep.base.errors import ModelError
from lockstep.core.host.hub_access import hub_answers

MAX_CONFIG_BYTES = 64 << 20
MIN_VOCABULARY = 3
"""Number of ordinary tokens; where a folder has no tokenizer, transformers makes up one with 0 to 2."""
ADAPTER = "adapter_config.json"
MAX_LAYERS, MAX_RANK = 10_000, 1 << 16
CODE = ("auto_map", "use_kernels", "kernel_config", "megatron_config", "trust_remote_code",
        "checkpoint_path", "pretrained_cfg_overlay")  # fmt: skip
"""Settings that name code beside them, of the hub or of a module, or files that timm would unpickle."""
FOREIGN = {
    "architecture": ":",
    "backbone": ":",
    "transformers_weights": r"[/\\]",
    "megatron_core": r"^(?!megatron\.core$)",
}
"""Settings that name code where their value matches, as do implementations with a slash in their name."""


def load(auto_class: Any, name: str | Path, **options: Any) -> Any:
    """Load a config, tokenizer or model of transformers from a folder or the hub. Raises ModelError for settings that
    name code and for a missing folder, and what transformers raises. The hub is asked only where it answers."""
    _check_exists(name)
    check_folder(Path(name))
    if auto_class.__name__.startswith(("AutoConfig", "AutoModel")):
        _refuse_adapter(Path(name))
    _refuse_kernels(auto_class)
    options["local_files_only"] = is_local = Path(name).is_dir() or not hub_answers()
    if auto_class.__name__.startswith("AutoModel"):  # which looks for an adapter, too, and would ask the hub for it
        options["adapter_kwargs"] = {"local_files_only": is_local}
    # without the option, transformers asks on the terminal whether to import the code that config.json names
    found = auto_class.from_pretrained(name, **options, trust_remote_code=False)
    if auto_class.__name__ == "AutoTokenizer":
        _check_tokenizer(found, name)
    made = found[0] if isinstance(found, tuple) else found
    parts: list[dict[str, Any]] = [made.__dict__, getattr(made, "config", made).__dict__]
    for settings in (*parts, getattr(made, "init_kwargs", {})):
        settings.pop("auto_map", None)  # else what is saved of it would name code
    return found


def _check_exists(name: str | Path) -> None:
    """Raise ModelError for a missing folder: a name that the hub cannot have, or one in a folder here that the hub
    cannot be asked for, and that its cache does not hold."""
    folder, is_local = Path(name), str(name).startswith(("/", ".", "~"))
    if folder.exists() or (len(folder.parts) < 2 and not is_local):
        return
    is_local = is_local or len(folder.parts) > 2
    if not is_local and folder.parent.is_dir():
        from huggingface_hub import try_to_load_from_cache

        is_local = not isinstance(try_to_load_from_cache(str(folder), "config.json"), str) and not hub_answers()
    if is_local:
        raise ModelError(f"there is no folder {folder.absolute()}: correct its path, or name a model of the hub")


def _refuse_adapter(folder: Path) -> None:
    """Raise ModelError for an adapter alone, which transformers would load with its model, all of it frozen."""
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is an adapter without its model, which {ADAPTER} names: give that model, the settings of "
            f"model.adapter with which this one was trained, and model.init={folder}; or a merged export"
        )


def _check_tokenizer(tokenizer: Any, name: str | Path) -> None:
    """Raise ModelError for a tokenizer without words, which transformers makes up where a folder has none."""
    if len(tokenizer) - len({*tokenizer.all_special_ids}) < MIN_VOCABULARY:
        what = f"{name} holds no tokenizer: copy tokenizer.json and tokenizer_config.json from the model that it is of"
        raise ModelError(f"{what}, or save them there with tokenizer.save_pretrained(FOLDER)")


def untrained(auto_class: Any, settings: Any, **options: Any) -> Any:
    """Build a model of transformers with random weights, from a config that `load` has returned."""
    _refuse_kernels(auto_class)
    return auto_class.from_config(settings, **options, trust_remote_code=False)


def read_adapter(folder: Path) -> Any:
    """Return the config of peft in a folder. Raises ModelError for settings that name code, and what peft raises."""
    import peft

    check_folder(folder)
    return peft.PeftConfig.from_pretrained(str(folder))


def add_adapter(network: Any, folder: Path, config: Any) -> None:
    """Put the adapter in a folder into a network, by the config that `read_adapter` has returned."""
    import peft

    peft.PeftModel.from_pretrained(network, str(folder), config=config, torch_device="cpu")


def _refuse_kernels(auto_class: Any) -> None:
    """Keep models of transformers from loading kernels of the hub, which are code: any setting may name one."""
    if auto_class.__name__.startswith("AutoModel"):  # the others are loaded without torch
        from transformers.integrations import hub_kernels

        loading: Any = hub_kernels
        loading.load_and_register_attn_kernel = loading.get_kernel_hub = _refuse_kernel


def _refuse_kernel(name: str, *_: Any, **__: Any) -> NoReturn:
    what = f"the model's settings ask for the kernel {name!r} of the hub, which is code and is not executed"
    raise ModelError(f"{what}: save the model with another implementation")


def check_folder(folder: Path) -> None:
    """Raise ModelError for settings that name code, which transformers or peft would import, or more layers than can be
    built; DataError for what leads out of the folder. Likewise for the folder of the model that an adapter names."""
    done: set[Path] = set()
    while folder not in done:
        done.add(folder)
        storage.require_own_files(folder)
        # a config.json may name others of its kind that are read in its place
        found = {path.name: _checked(path) for path in sorted(folder.glob("*config*.json"))}
        if isinstance(adapter := found.get(ADAPTER), dict) and "config.json" not in found:
            base = str(adapter.get("base_model_name_or_path"))
            folder = Path(base) if os.path.isdir(base) else folder


def _checked(path: Path) -> Any:
    """Return the settings in a file; None where it is no JSON. Raises ModelError."""
    try:
        whole = json.loads(storage.read_regular(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        return None  # loading the model reports it
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    for key, value in _settings(whole):
        if _names_code(key, value):
            raise ModelError(
                f"{path} names code ({key}), which is not executed: save the model without it where transformers "
                "knows its kind, or bring it as your own file with model.kind=user"
            )
        if isinstance(value, int) and key.endswith(("layers", "layer")) and value > MAX_LAYERS:
            raise ModelError(f"{path} asks for {value:,} layers ({key}), more than {MAX_LAYERS:,}")
        ranks = value.values() if key == "rank_pattern" and isinstance(value, dict) else [value] * (key == "r")
        if too_large := [each for each in ranks if isinstance(each, int) and each > MAX_RANK]:
            raise ModelError(f"{path} asks for an adapter of rank {too_large[0]:,} ({key}), more than {MAX_RANK:,}")
    return whole


def _names_code(key: str, value: Any) -> bool:
    if key in ("model_args", "backbone_kwargs"):  # of timm; elsewhere this only describes a model
        return isinstance(value, dict) and "pretrained_cfg" in value
    if key in FOREIGN:
        return isinstance(value, str) and re.search(FOREIGN[key], value) is not None
    return bool(key in CODE and value) or ("_implementation" in key and "/" in str(value))


def _settings(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every setting, at any depth, without recursion."""
    pending = [settings]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            yield from current.items()
            pending += current.values()
        elif isinstance(current, list):
            pending += current
