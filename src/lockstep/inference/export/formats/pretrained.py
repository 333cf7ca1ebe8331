"""The layout that others load directly: transformers' own, else safetensors with a loader."""

from pathlib import Path

import torch

from lockstep.base import plugins, storage
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats import _weights

FILE = _weights.FILE
DTYPES = ("fp32", "fp16", "bf16")
PROGRAM = None

LOADER = '''"""Loads the exported model: `python loader.py` prints it; `load()` returns it, ready to predict."""

import pathlib

from lockstep.inference.export.export_reader import forward_of


def load(folder=pathlib.Path(__file__).parent):
    """The model in evaluation mode; call it with {"image": uint8 tensor [m, C, H, W]} or what it was trained on."""
    return forward_of(folder)


if __name__ == "__main__":
    print(load())
'''


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """With save_pretrained() if the model has it, else safetensors with a loader."""
    if save := plugins.hook("models", facts.model["kind"], "save"):
        save(model, folder)
        return
    _weights.write(model, facts, folder)
    if not (folder / "loader.py").exists():  # else it is the user's own code
        storage.write(folder / "loader.py", LOADER)


def read(folder: Path, facts: ExportFacts) -> Forward:
    """With from_pretrained() if the model has it."""
    read_back = plugins.hook("models", facts.model["kind"], "read_back")
    if read_back is None:
        return _weights.read(folder, facts)
    with torch.device("meta"):
        empty = plugins.hook("models", facts.model["kind"], "from_config")(folder, facts.spec)
    _weights.check_parameter_count(empty, sorted(folder.glob("*.safetensors")))
    model: Model = read_back(folder, facts.spec)
    return model.eval()
