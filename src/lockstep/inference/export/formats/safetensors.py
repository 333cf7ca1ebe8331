"""The unwrapped weights as one safetensors file, which holds no code."""

from pathlib import Path

from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats import _weights

FILE = _weights.FILE
DTYPES = ("fp32", "fp16", "bf16")
PROGRAM = None


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    _weights.write(model, facts, folder)


def read(folder: Path, facts: ExportFacts) -> Forward:
    return _weights.read(folder, facts)
