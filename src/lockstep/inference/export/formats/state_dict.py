"""The unwrapped weights in one file, written by torch.save."""

from pathlib import Path

import torch

from lockstep.base import storage
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats._weights import rebuilt, save_config, unwrapped

FILE = None  # export.file names it
DTYPES = ("fp32", "fp16", "bf16")
PROGRAM = None


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    try:
        torch.save(unwrapped(model).state_dict(), folder / facts.file)
    except RuntimeError as error:  # what torch raises on a full disk
        raise OSError(str(error).partition("\n")[0]) from error
    save_config(model, facts, folder)


def read(folder: Path, facts: ExportFacts) -> Forward:
    with storage.regular(folder / facts.file) as file:
        storage.check_archive(file, (folder / facts.file).stat().st_size)
        model = rebuilt(facts, folder)
        unwrapped(model).load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    return model
