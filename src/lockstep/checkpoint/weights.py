"""The weights alone, from a checkpoint into a plain model."""

from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.reader import contents, load
from lockstep.checkpoint.verify import problem
from lockstep.errors import CheckpointError


def restore(model: nn.Module, folder: Path) -> None:
    """Fill a model's weights and buffers; the moving average's weights where the checkpoint has one.

    Raises CheckpointError when the checkpoint is damaged, or belongs to another model.
    """
    reason = problem(folder)
    if reason is not None:
        raise CheckpointError(f"{folder} cannot be used: {reason}")
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    load(folder, state)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    stored = contents(folder)
    average = {f"ema.{n}": p.detach() for n, p in model.named_parameters() if f"ema.{n}" in stored}
    if average:
        load(folder, average)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(average[f"ema.{name}"])
