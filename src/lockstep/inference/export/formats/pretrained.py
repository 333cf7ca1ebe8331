"""The layout that others load directly: transformers' own, else safetensors with a loader."""

from pathlib import Path

import torch

from lockstep.base import plugins, storage
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats import _weights
from lockstep.models._own_functions import with_own_loss

FILE = _weights.FILE
DTYPES = _weights.DTYPES
PROGRAM = None

LOADER = '''"""Loads the exported model: `python loader.py` prints it; `load()` returns it, ready to predict."""

import pathlib
import sys

from lockstep.base.errors import UntrustedCode
from lockstep.inference.export.export_reader import forward_of
from lockstep.inference.trained_model import authorize


def load(folder=pathlib.Path(__file__).parent, trust_code=False):
    """The model in evaluation mode; call it with {"image": uint8 tensor [m, C, H, W]} or what it was trained on.

    `trust_code` executes the Python files in the folder, which are those of whoever has exported it."""
    try:
        authorize(pathlib.Path(folder), None, trusts=trust_code)
    except UntrustedCode as error:
        raise UntrustedCode(f"{error} (in Python: load(trust_code=True))") from None
    return forward_of(folder)


if __name__ == "__main__":
    print(load(trust_code="--trust-code" in sys.argv))
'''


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """Write with save_pretrained() if the model has it, else safetensors with a loader."""
    if save := plugins.hook("models", facts.model["kind"], "save"):
        save(model, folder)
        return
    _weights.write(model, folder, batch=batch, facts=facts)
    if not (folder / "loader.py").exists():  # else it is the user's own code
        storage.write(folder / "loader.py", LOADER)


def read(folder: Path, facts: ExportFacts) -> Forward:
    """Read with from_pretrained() if the model has it."""
    read_back = plugins.hook("models", facts.model["kind"], "read_back")
    if read_back is None:
        return _weights.read(folder, facts)
    with torch.device("meta"):
        empty = plugins.hook("models", facts.model["kind"], "from_config")(folder, facts.spec)
    _weights.check_parameter_count(empty, sorted(folder.glob("*.safetensors")))
    return with_own_loss(read_back(folder, facts.spec), _weights.section_of(facts, folder)[1]).eval()
