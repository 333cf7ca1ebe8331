"""Checks that modules and weights can be trained."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model
from lockstep.core.modules.outputs import graph_leaves, tensors
from lockstep.core.numerics.seeds import generators_restored

TRIED, LENGTH = 2, 64
"""Number of samples of the trial (BatchNorm needs two), and of their tokens."""


def make_trainable(model: nn.Module) -> None:
    """Raise ModelError for modules and weights that no strategy can train. Embeddings get dense gradients: of large
    ones, only the rows that were read are added and exchanged anyway."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f"{name} is a torch.jit module, which takes no hooks: use the module that it was made of")
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise ModelError(f"{name} is wrapped in {type(module).__name__}: use its .module, which is spread here")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    _check_tensors(model)


def _check_tensors(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            what = f"{name} has no shape yet, as in a lazy module: give its layer the input size"
            raise ModelError(f"{what}, or run the model once on a batch of zeros where it is built")
        if tensor.is_meta:
            raise ModelError(f"{name} is on the device meta, without values: build the model on the CPU")
        if tensor.requires_grad and tensor.is_complex():
            raise ModelError(
                f"{name} has complex numbers, which not all optimizers and strategies can train: keep it as "
                "nn.Parameter(torch.view_as_real(...)), and use torch.view_as_complex of it in forward()"
            )


def unreached(model: Model, sample: Callable[[], Batch]) -> list[str]:
    """Return the trained weights that the outputs do not depend on in a forward pass of two samples; none where it
    fails, which the first step then reports.

    Layers with a reached sibling, such as experts, are used by other samples and not returned.
    Only autograd's graph is read: no activations are kept and no gradients computed.
    """
    try:
        with generators_restored(), saved_tensors_hooks(lambda _: None, lambda kept: kept):
            batch = {name: _start(column) for name, column in sample().items()}
            outputs = functional_call(model.train(), {name: b.clone() for name, b in model.named_buffers()}, (batch,))
    except Exception:
        return []
    found = graph_leaves(tensors(outputs))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reached = {_kind(name) for name, p in trained.items() if p in found}
    return [name for name in trained if reached and _kind(name) not in reached]


def _start(column: Tensor) -> Tensor:
    is_tokens = column.ndim == 2 and not column.is_floating_point()
    return column[:TRIED, :LENGTH] if is_tokens else column[:TRIED]


def _kind(name: str) -> str:
    """Return the name of a weight without layer numbers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
