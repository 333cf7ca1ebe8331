"""A model as a function of plain tensors, which is what can be traced."""

import io
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from torch import Tensor, nn

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model

TOKENS = ("input_ids", "attention_mask")
LONGEST_REASON = 400
"""Characters of what a tracer says."""


class Traceable(nn.Module):
    """Calls a model with tensors in the order of their names, instead of a batch."""

    def __init__(self, model: Model, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor | dict[str, Tensor]:
        return outputs_of(self.model, dict(zip(self.names, tensors, strict=True)))


def outputs_of(model: nn.Module, batch: Batch) -> Tensor | dict[str, Tensor]:
    """What a graph can give: a tensor, or tensors by name. Raises ModelError for a model that gives something else."""
    found = model(batch)
    if isinstance(found, Tensor):
        return found
    if isinstance(found, Mapping) and all(isinstance(name, str) for name in found):
        named = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
        if named and len(named) == len(found):
            return named
    raise ModelError(
        f"forward() returns a {type(found).__name__}: a tensor, or a dict of tensors, can be written as a graph; "
        "export.kind=pretrained takes any model"
    )


def names_of(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """The keys of the dict that a model returns; () where it returns something else."""
    model.eval()
    with torch.inference_mode():
        found = model(batch)
    return tuple(map(str, found)) if isinstance(found, Mapping) else ()


def inputs_of(batch: Batch) -> Batch:
    """What of a batch the model may look at; twice over, as one sample alone would be taken for what is always one."""
    columns = {name: column for name, column in batch.items() if name != "label"}
    return {name: column.repeat(2, *[1] * (column.ndim - 1)) for name, column in columns.items()}


def cannot_be_traced(error: BaseException, kind: str) -> ModelError:
    """What to tell of whatever a tracer has raised about somebody's code."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModelError):
        return error
    first, *_ = str(error).strip().split("\n\n")
    reason = textwrap.shorten(first, LONGEST_REASON) or type(error).__name__
    places = re.findall(r'File "(.*)", line (\d+)', str(error))
    where = "{}:{}: ".format(*places[-1]) if places else ""
    return ModelError(
        f"the model cannot be written as {kind}: {where}{reason}\n"
        "  Its forward() has to be made of tensor operations that do not depend on numbers in them, in one dtype;\n"
        "  export.kind=pretrained takes any model."
    )


def moving_dimensions(name: str) -> dict[int, str]:
    """The dimensions of an input that may be of any size: the batch's, and the length of texts."""
    return {0: "batch", 1: "length"} if name in TOKENS else {0: "batch"}


@contextmanager
def silence() -> Iterator[None]:
    """Tracers and quantisers tell of much that nobody has asked for: warnings, and whole graphs on stderr."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
