"""A model as a function of tensors that can be traced."""

import io
import logging
import re
import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from torch import Tensor, nn

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model

TOKENS = ("input_ids", "attention_mask")
LONGEST_REASON = 400
"""Maximum number of characters of a tracer's message."""


class Traceable(nn.Module):
    """A model that takes tensors in the order of `names` instead of a batch."""

    def __init__(self, model: Model, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor | dict[str, Tensor]:
        """Return outputs that a graph can return: a tensor, or tensors by name. Raises ModelError for others."""
        outputs = self.model(dict(zip(self.names, tensors, strict=True)))
        if isinstance(outputs, Tensor):
            return outputs
        if isinstance(outputs, Mapping) and all(isinstance(name, str) for name in outputs):
            named = {name: tensor for name, tensor in outputs.items() if isinstance(tensor, Tensor)}
            if named and len(named) == len(outputs):
                return named
        raise ModelError(
            f"forward() returns a {type(outputs).__name__}: a tensor, or a dict of tensors, can be written as a graph; "
            "export.kind=pretrained takes any model"
        )


def names_of(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Return the keys of the dict that a model returns; () if it returns no dict."""
    model.eval()
    with torch.inference_mode():
        outputs = model(batch)
    return tuple(map(str, outputs)) if isinstance(outputs, Mapping) else ()


def inputs_of(batch: Batch, targets: Collection[str]) -> Batch:
    """Return the batch without targets, repeated twice: a tracer would take a batch size of 1 for a constant."""
    columns = {name: column for name, column in batch.items() if name not in targets}
    return {name: column.repeat(2, *[1] * (column.ndim - 1)) for name, column in columns.items()}


def dynamic_dimensions(name: str) -> dict[int, str]:
    """Return the dimensions of an input that may have any size: the batch, and the length of texts."""
    return {0: "batch", 1: "length"} if name in TOKENS else {0: "batch"}


@contextmanager
def silence() -> Iterator[None]:
    """Suppress warnings, logs and prints: tracers and quantisers write whole graphs to stderr."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def tracing(kind: str) -> Iterator[None]:
    """Silence a tracer. Raises ModelError for a model that it refuses to write as `kind`."""
    try:
        with silence():
            yield
    except Exception as error:  # whatever the tracer raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, ModelError):
            raise cause from error
        first, *_ = str(cause).strip().split("\n\n")
        reason = textwrap.shorten(first, LONGEST_REASON) or type(cause).__name__
        lines = re.findall(r'File "(.*)", line (\d+)', str(cause))
        where = "{}:{}: ".format(*lines[-1]) if lines else ""
        raise ModelError(
            f"the model cannot be written as {kind}: {where}{reason}\n"
            "  Its forward() has to be made of tensor operations that do not depend on numbers in them, in one dtype;\n"
            "  export.kind=pretrained takes any model."
        ) from error
