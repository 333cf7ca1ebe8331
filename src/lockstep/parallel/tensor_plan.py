"""Splits the layers of a model by its tensor-parallel plan with PyTorch's parallelize_module, after checking the plan.

M. Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism, 2019.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import Model
from lockstep.core.modules.dtensors import first_names

GATHERED = partial(ColwiseParallel, output_layouts=Replicate())
TAKEN = partial(RowwiseParallel, input_layouts=Replicate())
"""Column-wise with gathered outputs; row-wise with replicated inputs."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise_split_input": TAKEN,
    "rowwise_rep": TAKEN,
    "embedding_rowwise": TAKEN,
    "embedding_colwise": GATHERED,
}
SUMMED = "replicated_with_grad_allreduce"
"""Replicated, but each rank uses it for its own heads: the gradient is the sum over the group."""
REPLICATED = ("replicate", SUMMED)
"""Styles of modules that are not split."""


def planned(model: Model, size: int, world: int) -> dict[str, str]:
    """Return the style of each module in a model's plan. Raises ModelError where `size` processes cannot share it."""
    plan = model.tensor_plan()
    styles = {} if plan is None else _resolved(model, plan.styles)
    if plan is None or not set(styles.values()).difference(REPLICATED):
        raise ModelError(
            "parallel.kind=tensor needs a model that says how it can be split, and this one does not: take a "
            "model.kind=transformer or causal_lm whose transformers config has a tp_plan, such as Llama, Qwen2 or "
            "Mistral, or use parallel.kind=fsdp or pipeline"
        )
    if unknown := {name: style for name, style in styles.items() if style not in (*STYLES, *REPLICATED)}:
        what = f"this model's plan splits {few(unknown)} in ways that are not supported"
        raise ModelError(f"{what} ({', '.join(sorted(set(unknown.values())))}): use parallel.kind=fsdp")
    _check_tied(model, styles)
    _check_counts({**plan.counts, **_features(model, styles)}, size, world)
    return styles


def splittable(model: Model) -> tuple[frozenset[str], dict[str, int]]:
    """Return the names of the parameters that are split, and what has to be divided by the number of processes: name ->
    count. Raises ModelError for a model that cannot be split."""
    styles, plan = planned(model, 1, 1), model.tensor_plan()
    assert plan is not None
    modules = tuple(f"{name}." for name, style in styles.items() if style in STYLES)
    names = (name for name, _ in model.named_parameters())
    whole = {f"{name}.bias" for name, style in styles.items() if style.startswith("rowwise")}  # added after the sum
    split = frozenset(name for name in names if name.startswith(modules) and name not in whole)
    return split, {**plan.counts, **_features(model, styles)}


def _resolved(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module and parameter that a pattern of the plan matches."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    generic = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
    return {name: styles[pattern] for name, pattern in generic.items() if pattern in styles}


def _check_tied(model: nn.Module, styles: Mapping[str, str]) -> None:
    names: dict[str, list[str]] = {}
    for name, first in first_names(model).items():
        names.setdefault(first, []).append(name)
    for several in names.values():
        split = [name for name in several if styles.get(name.rpartition(".")[0], "replicate") not in REPLICATED]
        if split and len(several) > 1:
            raise ModelError(
                f"{' and '.join(several)} are one tensor, and splitting {split[0]} would make them two: set "
                "tie_word_embeddings to false in the model's config.json, or use parallel.kind=fsdp"
            )


def _features(model: nn.Module, styles: Mapping[str, str]) -> dict[str, int]:
    """Return the features by which each linear layer is split; an embedding may be split unevenly."""
    features = {}
    for name, style in styles.items():
        module = model.get_submodule(name) if style in STYLES else None
        if isinstance(module, nn.Linear):
            side = "in_features" if style.startswith("rowwise") else "out_features"
            features[f"{side} of {name}"] = int(getattr(module, side))
    return features


def _check_counts(counts: Mapping[str, int], size: int, world: int) -> None:
    for what, count in counts.items():
        if count % size:
            possible = [n for n in range(1, size) if all(each % n == 0 for each in (world, *counts.values()))]
            why = f"parallel.size={size} does not divide the {count} {what} of this model"
            raise ModelError(f"{why}: set parallel.size to {' or '.join(map(str, possible))}")


def split_layers(model: Model, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Split the modules over a mesh of one axis, in place; their parameters become DTensors."""
    plan = {name: STYLES[style]() for name, style in styles.items() if style in STYLES}
    with warnings.catch_warnings():  # no random numbers are drawn for a DTensor
        warnings.filterwarnings("ignore", message="DTensor random operators")
        parallelize_module(model, mesh, plan)


def is_split(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor with a placement other than Replicate."""
    return isinstance(tensor, DTensor) and any(not placement.is_replicate() for placement in tensor.placements)


def summed_modules(model: nn.Module, styles: Mapping[str, str]) -> set[str]:
    """Return the names of the parameters whose gradients are sums over the group."""
    inside = [f"{name}." for name, style in styles.items() if style == SUMMED]
    return {name for name, _ in model.named_parameters() if any(name.startswith(prefix) for prefix in inside)}
