"""A model from the user's own Python file."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lockstep import plugins
from lockstep.config import LocalPath, PluginSection
from lockstep.contracts import Batch, DataSpec, LossSum, Model
from lockstep.errors import ModelError
from lockstep.runtime.blocks import blocks_of
from lockstep.runtime.loss import classification_loss


class Config(PluginSection):
    """A Python file with `build(options, spec)`, and optionally `loss(outputs, batch)` and `metrics(spec)`."""

    file: LocalPath
    """The Python file."""
    options: dict[str, Any] = {}
    """Whatever the file's functions want; they get it as it is."""

    @property
    def modality(self) -> str:
        """Takes whatever the user's code takes."""
        return "any"


class UserModel(Model):
    """A user's module under Lockstep's contract; `network` is the module itself."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Batch], LossSum]) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def forward(self, batch: Batch) -> Tensor:
        """Whatever the module makes of the batch."""
        return self.network(batch)

    def loss(self, outputs: Tensor, batch: Batch) -> LossSum:
        """The module's own loss, else the file's, else cross-entropy against batch["label"]."""
        return self._loss(outputs, batch)

    def blocks(self) -> list[nn.Module]:
        """The module's own blocks, else its layers or children."""
        own = getattr(self.network, "blocks", None)
        return own() if callable(own) else blocks_of(self.network)


def build(config: Config, spec: DataSpec) -> Model:
    """Call the file's `build`; raises ModelError when it is missing or does not return a module."""
    module = plugins.load_file(config.file)
    if not hasattr(module, "build"):
        raise ModelError(f"{config.file} has no function build(options, spec) that returns a torch module")
    network = module.build(config.options, spec)
    if not isinstance(network, nn.Module):
        raise ModelError(f"build() in {config.file} returned {type(network).__name__}, not a torch.nn.Module")
    loss = getattr(network, "loss", None) or getattr(module, "loss", None) or classification_loss
    return UserModel(network, loss)


def metrics(config: Config, spec: DataSpec) -> dict[str, Any]:
    """The file's own torchmetrics by name; empty when it has no `metrics`."""
    make = getattr(plugins.load_file(config.file), "metrics", None)
    return make(spec) if make else {}
