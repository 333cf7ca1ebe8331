"""The unwrapped weights as one safetensors file, which holds no code."""

from pathlib import Path

from lockstep.base.contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import Facts
from lockstep.inference.export.formats import _weights

FILE = _weights.FILE
DTYPES = ("fp32", "fp16", "bf16")


def write(model: Model, folder: Path, *, batch: Batch, facts: Facts) -> None:
    """One file, model.safetensors."""
    _weights.write(model, facts, folder)


def read(folder: Path, facts: Facts) -> Forward:
    """The model itself."""
    return _weights.read(folder, facts)
