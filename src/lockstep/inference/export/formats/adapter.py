"""Only the adapter, as peft loads it beside the pretrained model."""

from pathlib import Path

import torch

from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats import _weights
from lockstep.models import _adapter, _own_functions
from lockstep.models.objectives._choice import name_of

FILE = _adapter.WEIGHTS
DTYPES = ("fp32", "fp16", "bf16")
PROGRAM = None


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """With the name of the model that it belongs to."""
    _adapter.save_adapter(model, folder, base=facts.model.get("name"), objective=name_of(facts.spec))


def read(folder: Path, facts: ExportFacts) -> Forward:
    """The pretrained model, which is loaded anew, with the adapter."""
    _, section = _weights.section_of(facts, folder, is_adapter=True)
    assert section.adapter is not None, "it is written only where there is one"
    with torch.random.fork_rng():
        model = _own_functions.build(section, facts.spec)
        _adapter.attach(model, section.adapter, has_new_head=section.HAS_NEW_HEAD)
    _adapter.load_adapter(model, folder)
    return model.eval()
