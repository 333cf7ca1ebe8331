"""Which modules and weights can be trained."""

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep.base.errors import ModelError


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
            raise ModelError(
                f"{name} has no shape yet, as in a lazy module: give its layer the input size, or run the model once "
                "on a batch of zeros where it is built"
            )
        if tensor.is_meta:
            raise ModelError(f"{name} is on the device meta, without values: build the model on the CPU")
        if tensor.requires_grad and tensor.is_complex():
            raise ModelError(
                f"{name} has complex numbers, which not all optimizers and strategies can train: keep it as "
                "nn.Parameter(torch.view_as_real(...)), and use torch.view_as_complex of it in forward()"
            )
