"""Parts of Lockstep that the lessons use: its data, its order of samples, and a comparison with its weights."""

import io
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint import reader
from lockstep.checkpoint.weights import MODEL
from lockstep.data.order import Order
from lockstep.data.sources import _digits
from lockstep.data.sources.digits import Config
from lockstep.run.api import spawn
from lockstep.tools.trials import processes_text

SETTINGS = ("optim.kind=sgd", "optim.weight_decay=0", "optim.clip=null", "schedule.shape=constant", "schedule.warmup=0")
"""Settings equal to torch.optim.SGD with a momentum of 0.9, as the lessons use it."""

ROUNDING = 1e-4


class Pixels(nn.Module):
    """The first layer of a lesson's network: a batch, which is a dict, -> its images [n, 64], from 0 to 1."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["image"].flatten(1).float() / 255


def digits(split: str) -> dict[str, Tensor]:
    """Load the handwritten digits of scikit-learn: "image" [N, 1, 8, 8] uint8, and "label" [N] int64."""
    source = _digits.build(Config(kind="digits"), split)
    batch = source.__getitems__(range(len(source)))
    return {name: torch.as_tensor(np.asarray(values)) for name, values in batch.items()}


def order(samples: int, step: int, *, global_batch: int, micro_batch: int) -> list[Tensor]:
    """Return the samples of a step, as the rows of each of its micro-batches."""
    shards = Order(seed=0, samples=samples, global_batch=global_batch, micro_batch=micro_batch).shards(step)
    return [torch.tensor(shard) for shard in shards]


def compare(model: nn.Module, file: str, settings: Sequence[str], *, processes: int, why: str = "") -> str:
    """Train the model of a lesson's file with Lockstep, on the digits and from the same seed -> how the weights differ.

    `why`: the reason, if the bits differ. Raises AssertionError if they differ by more than rounding does.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = {"run": {"dir": folder, "name": "lesson"}, "data": {"kind": "digits"}, "model": {"kind": "user"}}
        recipe["model"]["file"] = file
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            run = spawn(recipe, *SETTINGS, *settings, processes=processes)
        (checkpoint,) = (run.folder / "checkpoints").glob("step-*")
        own = {f"{MODEL}network.{name}": tensor for name, tensor in model.state_dict().items()}
        theirs = {name: torch.empty_like(tensor) for name, tensor in own.items()}
        reader.load(checkpoint, theirs)
    most = max((theirs[name] - tensor).abs().max().item() for name, tensor in own.items())
    assert most < ROUNDING, f"the weights differ by up to {most}"
    where = f"Lockstep on {processes_text(processes)}, same recipe"
    return f"{where}: the same bits" if most == 0 else f"{where}: other bits, weights within {ROUNDING}: {why}"
