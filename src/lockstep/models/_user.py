"""A user's module, loss and metrics, as his file gives them."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from torch import nn

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Model, Outputs
from lockstep.core.modules.blocks import blocks_of
from lockstep.core.modules.outputs import register
from lockstep.core.numerics.loss import checked, classification_loss
from lockstep.models.user import Config

TermCounts = Callable[[Batch], Mapping[str, float]]


class UserModel(Model):
    """A user's module under Lockstep's contract; `network` is the module itself."""

    def __init__(
        self, network: nn.Module, loss: Callable[[Outputs, Batch], LossSum], term_counts: TermCounts | None = None
    ) -> None:
        super().__init__()
        self.network, self._loss, self.term_counts = network, loss, term_counts

    def forward(self, batch: Batch) -> Outputs:
        """Whatever the module makes of the batch: a tensor, or a tree of tensors."""
        outputs = self.network(batch)
        register(outputs)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """The module's own loss, else the file's, else cross-entropy against batch["label"]. Raises ModelError where
        it returns something else than sums, or terms that nobody counts."""
        found = checked(self._loss(outputs, batch))
        if found.terms and self.term_counts is None:
            raise ModelError(
                f"the loss has the terms {sorted(found.terms)}, but there is no function term_counts(batch) beside it, "
                "which tells what they count: the counts of all processes have to be known before the backward pass"
            )
        return found

    def blocks(self) -> list[nn.Module]:
        """The module's own blocks, else its layers or children."""
        return own_blocks(self.network)


def build(config: Config, spec: DataSpec) -> Model:
    """Call the file's `build`; raises ModelError when it is missing or does not return a module."""
    module = plugins.load_file(config.file, "model.file")
    if not hasattr(module, "build"):
        raise ModelError(f"{config.file} has no function build(options, spec) that returns a torch module")
    network = module.build(config.options, spec)
    if not isinstance(network, nn.Module):
        raise ModelError(f"build() in {config.file} returned {type(network).__name__}, not a torch.nn.Module")
    loss = own_loss(network, getattr(module, "loss", None)) or classification_loss
    counts = [getattr(place, "term_counts", None) for place in (network, module)]
    return UserModel(network, loss, next((each for each in counts if _is_function(each, arguments=1)), None))


def own_blocks(network: nn.Module) -> list[nn.Module]:
    """What a method `blocks()` without arguments returns, where that is modules; else the entries of an attribute
    `blocks`, a ModuleList or a Sequential, and what lies beside it; else layers or children, by structure."""
    own: Any = getattr(network, "blocks", None)
    if _is_function(own, arguments=0):
        found = own()
        if isinstance(found, list | tuple | nn.ModuleList) and all(isinstance(part, nn.Module) for part in found):
            return list(dict.fromkeys(found))
    if isinstance(own, nn.Sequential):
        parts = [[*part] if part is own else [part] for part in blocks_of(network)]
        return list(dict.fromkeys(block for several in parts for block in several))
    return blocks_of(network)


def own_loss(network: nn.Module, of_file: Any) -> Callable[..., Any] | None:
    """The module's `loss(outputs, batch)`, else the file's; None for cross-entropy. A loss module is neither: it is
    called by the user's own code. Raises ModelError where such a one would be left aside for another kind of loss."""
    for loss in (getattr(network, "loss", None), of_file):
        if _is_function(loss, arguments=2):
            return cast(Callable[..., Any], loss)
    for loss in (getattr(network, "loss", None), of_file):
        if isinstance(loss, nn.Module) and not _is_plain_cross_entropy(loss):
            raise ModelError(
                f"`loss` is an nn.{type(loss).__name__}, which is a mean over the micro-batch: write a function "
                "`loss(outputs, batch)` that returns LossSum(total, count), with reduction='sum'"
            )
    return None


def _is_plain_cross_entropy(loss: nn.Module) -> bool:
    return isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0


def _is_function(value: Any, *, arguments: int) -> bool:
    """Whether something is a function or method that can be called with so many arguments."""
    if not inspect.isroutine(value) and not isinstance(value, partial):
        return False
    try:
        inspect.signature(value).bind(*[None] * arguments)
    except (TypeError, ValueError):
        return False
    return True


def metrics(config: Config, spec: DataSpec) -> dict[str, Any]:
    """The file's own torchmetrics by name; empty when it has no `metrics`."""
    make = getattr(plugins.load_file(config.file, "model.file"), "metrics", None)
    return make(spec) if make else {}
