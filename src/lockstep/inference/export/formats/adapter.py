"""Only the adapter, as peft loads it beside the pretrained model."""

import os
from pathlib import Path

import torch

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats import _weights
from lockstep.models import _adapter, _own_functions
from lockstep.models.objectives._choice import name_of

FILE = _adapter.WEIGHTS
DTYPES = ("fp32", "fp16", "bf16")
PROGRAM = None


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """Write the adapter, with the name of the model that it belongs to."""
    revision = facts.model.get("revision") if facts.base_model else None
    base = os.path.expanduser(facts.base) or None
    _adapter.save_adapter(model, folder, base=base, revision=revision, objective=name_of(facts.spec))


def read(folder: Path, facts: ExportFacts) -> Forward:
    """Load the pretrained model anew, with the adapter. Raises ModelError."""
    if base := os.path.expanduser(facts.base):
        if Path(base).is_absolute() and not Path(base).is_dir():
            raise ModelError(
                f"the model that the adapter was trained beside is no longer in {base}: name its folder with --base"
            )
        facts = facts.model_copy(update={"model": facts.model | {"name": base}})
    _, section = _weights.section_of(facts, folder, is_adapter=True)
    with torch.random.fork_rng():
        model = _own_functions.build(section, facts.spec)
        _adapter.load_adapter(model, folder, digest=facts.base_digest, settings=facts.base_settings)
    return model.eval()
