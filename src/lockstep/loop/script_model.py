"""A script's own model: the same weights on every process, its seeds, its precision, and undoing all of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import Batch, LossSum, Outputs
from lockstep.core.distributed.collectives import all_gather_object, broadcast_tensors, raise_on_all_ranks
from lockstep.core.modules.buffer_rules import declare
from lockstep.core.modules.outputs import widened
from lockstep.core.numerics.digest import digest
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import restore_forward
from lockstep.models._user import UserModel
from lockstep.training.trainable import make_trainable


def wrapped(model: nn.Module, buffers: Mapping[str, str]) -> UserModel:
    """Wrap a model; its weights get the names they have in a run with model.kind=user. `buffers`: rules."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"lockstep.Loop takes a torch.nn.Module, not a {type(model).__name__}")
    make_trainable(model)
    declare(model, buffers)
    return UserModel(model, _no_loss)


def _no_loss(_: Outputs, __: Batch) -> LossSum:
    raise NotImplementedError("the loss is the script's")


def made_equal(model: nn.Module) -> bool:
    """Give every rank the weights and buffers of rank 0 -> whether they differed. Raises ModelError where the models
    are not of one kind."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    kinds = all_gather_object(own)
    with raise_on_all_ranks():
        if other := [name for name in {**kinds[0], **own} if kinds[0].get(name) != own.get(name)]:
            raise ModelError(f"the processes have made different models: {few(sorted(other))} are not as on rank 0")
    if len(set(all_gather_object(digest(tensors)))) == 1:
        return False
    broadcast_tensors(tensors.values())
    return True


class AutocastForward:
    """Runs a model's forward pass in the run's precision, and gives fp32 outputs to the script, while `inside`."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model, self.precision, self.is_active = model, precision, False

    @contextmanager
    def inside(self) -> Iterator[None]:
        if self.is_active:
            yield
            return
        model, before = self.model, vars(self.model).get("forward")
        forward = model.forward

        def wide(*args: Any, **kwargs: Any) -> Any:
            with self.precision.autocast():
                outputs = forward(*args, **kwargs)
            return widened(outputs)

        model.forward, self.is_active = wide, True
        try:
            yield
        finally:
            self.is_active = False
            restore_forward(model, before)
