"""Loads only the weights of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint.reader import contents, load
from lockstep.checkpoint.verify import problem

MODEL, AVERAGE = "model.", "ema."
"""Prefixes of the names of weights and buffers in a checkpoint, and of their moving averages."""


def restore(state: Mapping[str, Tensor], parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Fill weights and buffers in place, of a DTensor its local shard; the parameters with the moving average where the
    checkpoint has one.

    Raises CheckpointError when the checkpoint is damaged, or belongs to another model.
    """
    reason = problem(folder)
    if reason is not None:
        raise CheckpointError(f"{folder} cannot be used: {reason}")
    load(folder, {MODEL + name: tensor.detach() for name, tensor in state.items()})
    stored = contents(folder)
    average = {AVERAGE + name: tensor.detach() for name, tensor in parameters.items() if AVERAGE + name in stored}
    if average:
        load(folder, average)


def restore_model(model: nn.Module, folder: Path) -> None:
    """Fill the weights and buffers of a model that is not sharded, as `restore` does."""
    restore(model.state_dict(), dict(model.named_parameters()), folder)
