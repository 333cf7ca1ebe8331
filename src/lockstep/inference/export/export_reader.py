"""An export, as others find it: its facts and the function that it holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.base import plugins, storage, trust
from lockstep.base.contracts import Tokenizer
from lockstep.base.errors import LockstepError, ModelError, UntrustedCode
from lockstep.base.model_contracts import Batch, Forward, LossSum, Model, Outputs
from lockstep.core.numerics.loss import classification_loss
from lockstep.inference.export import export_facts as telling
from lockstep.inference.export.export_config import FORMATS
from lockstep.inference.export.export_facts import FILE, ExportFacts
from lockstep.inference.export.formats import _weights


def is_export(folder: Path) -> bool:
    return (folder / FILE).is_file()


def code_of(folder: Path, facts: ExportFacts) -> list[trust.Code]:
    """What reading an export would execute: the user's file beside the weights, and a program that is no mere graph.
    Raises ModelError."""
    codes = trust.code_with_imports(folder / facts.model["file"]) if "file" in facts.model else []
    with _told(folder):
        program = plugins.find(FORMATS, facts.kind).PROGRAM
        return [*codes, *([_program(folder / program)] if program else [])]


def _program(file: Path) -> trust.Code:
    return trust.Code(str(file), file.stat().st_size, storage.sha256(file))


def forward_of(folder: Path, facts: ExportFacts | None = None) -> Forward:
    """What an export computes, on the processor: a module in evaluation mode where it holds one.

    Raises ModelError where the folder is no export, or a damaged one.
    """
    folder = Path(folder).absolute()
    facts = facts or telling.read(folder)
    with _told(folder):
        forward: Forward = plugins.find(FORMATS, facts.kind).read(folder, facts)
    return forward


def tokenizer_of(folder: Path, facts: ExportFacts) -> Tokenizer | None:
    """The tokenizer that lies beside the weights, for models that take tokens."""
    if facts.modality != "text" or not plugins.find("models", facts.model["kind"]).Config.TAKES_TOKENS:
        return None
    with _told(folder):
        plugin, section = _weights.section_of(facts, folder)
        found: Tokenizer = plugin.tokenizer(section)
    return found


def loss_of(folder: Path, facts: ExportFacts, forward: Forward) -> Callable[[Outputs, Batch], LossSum]:
    """The model's own loss. A graph has left its model behind: the user's file beside it tells, else cross-entropy."""
    if isinstance(forward, Model):
        return forward.loss
    if "file" not in facts.model:
        return classification_loss
    with _told(folder):
        plugin, section = _weights.section_of(facts, folder)
        model: Model = plugin.build(section, facts.spec)
    return model.loss


def metrics_of(folder: Path, facts: ExportFacts) -> dict[str, Any]:
    """The user's own torchmetrics by name."""
    with _told(folder):
        plugin, section = _weights.section_of(facts, folder)
        make = plugins.hook("models", facts.model["kind"], "metrics")
        return make(section, facts.spec) if make else {}


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Whatever goes wrong while an export is read is told as its own fault, and not as one of the library that reads
    it: there are as many exceptions as libraries. A user's own code is among them, and may want what is not there."""
    try:
        yield
    except UntrustedCode:
        raise
    except LockstepError as error:
        raise ModelError(f"the export {folder} cannot be used: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise ModelError(
            f"the export {folder} cannot be read ({reason}): where it is damaged, export the run again"
        ) from error
