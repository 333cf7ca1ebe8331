"""What models of transformers have in common: load them without code of their own, check, split and save them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.base import storage
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import TensorPlan
from lockstep.core.host.hub_access import hub_answers
from lockstep.core.modules.blocks import blocks_of
from lockstep.models._objective_model import ObjectiveModel
from lockstep.models._pretrained_config import PretrainedSection
from lockstep.models.objectives._choice import name_of, width_of

WITHOUT_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Without it, transformers asks on the terminal whether to import the code that config.json names."""
PROBLEM_TYPES = {"regression": "regression", "multilabel": "multi_label_classification"}
"""What transformers' pipelines call an objective; the others follow from the labels."""
MAX_CONFIG_BYTES = 64 << 20
MAX_LAYERS = 10_000
MAX_NAMES = 3
"""Weights named in a message."""


class NetworkModel(ObjectiveModel):
    """Adapter from a transformers model (`network`) to Lockstep's Model."""

    def __init__(self, network: nn.Module, spec: DataSpec) -> None:
        super().__init__(spec)
        self.network = network

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


def save_network(model: NetworkModel, folder: Path) -> None:
    """Write the model with transformers' save_pretrained."""
    silence()
    model.network.save_pretrained(folder)  # type: ignore[operator]


def save_architecture(model: NetworkModel, folder: Path) -> None:
    """Write only the config.json of the model."""
    network: Any = model.network
    network.config.save_pretrained(folder)


def from_pretrained(auto_class: Any, config: PretrainedSection, *, check: Callable[[Any], None], **options: Any) -> Any:
    """What an auto class of transformers loads; `check` gets its transformers config before. Raises ModelError."""
    from transformers import AutoConfig

    folder = Path(config.name)
    if config.name.startswith(("/", ".", "~")) and not folder.is_dir():
        raise ModelError(f"model.name={config.name}: there is no such folder")
    silence()
    if folder.is_dir():
        check_folder(folder)
    origin = {"revision": config.revision, "local_files_only": folder.is_dir() or not hub_answers(), **WITHOUT_CODE}
    try:
        settings = AutoConfig.from_pretrained(config.name, **origin)
    except Exception:
        settings = None  # loading the model or its tokenizer reports it
    if settings is not None:
        check(settings)
    with reported(config):
        return auto_class.from_pretrained(config.name, **origin, **options)


def head_of(spec: DataSpec) -> dict[str, Any]:
    """Options of `from_pretrained` for a new head, with the names of the targets in the model's config."""
    names = dict(enumerate(spec.labels or spec.numbers))
    return {
        "num_labels": width_of(spec),
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "problem_type": PROBLEM_TYPES.get(name_of(spec)),
    }


@contextmanager
def reported(config: PretrainedSection) -> Iterator[None]:
    """Turn whatever is raised while a model is loaded into a ModelError."""
    try:
        yield
    except Exception as error:  # a damaged config or tokenizer can raise anything inside the libraries
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"cannot load model.name={config.name}: {reason}\n"
            "  It is neither a local folder with config.json, weights and tokenizer files, nor a model that can be\n"
            "  fetched from the hub right now. Give a folder with model.name=PATH, or go online once: `lockstep data`\n"
            "  fetches everything a config needs."
        ) from error


def mismatches(loading: dict[str, Any], prefix: str = "") -> list[str]:
    """Notes on weights with this prefix that only the model or only the checkpoint has, from transformers' report."""
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


def check_folder(folder: Path) -> None:
    """Raise ModelError for a config that names Python code of its own, which transformers would import, or more layers
    than can be built."""
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        try:
            settings = json.loads(storage.read_regular(path, MAX_CONFIG_BYTES))
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


def silence() -> None:
    """Turn off transformers' own warnings and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
