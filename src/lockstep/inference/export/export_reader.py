"""Reads an export: its forward function, tokenizer, loss and metrics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.base import plugins, storage, trust
from lockstep.base.contracts import Tokenizer
from lockstep.base.errors import LockstepError, ModelError, UntrustedCode
from lockstep.base.model_contracts import Batch, Forward, LossSum, Model, Outputs
from lockstep.core.host.pretrained_processors import FeatureExtractor, ImageProcessor, Waves
from lockstep.data.chat import ChatTokenizer
from lockstep.data.data_config import NO_PROCESSOR
from lockstep.data.preparation import preparation_of
from lockstep.data.processors import Processor
from lockstep.data.sounds import SoundReader
from lockstep.data.text_tokenizers import saved_tokenizer
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_facts import FILE, ExportFacts
from lockstep.inference.export.formats import _weights
from lockstep.models import _own_functions
from lockstep.recipe.export_config import FORMATS


def is_export(folder: Path) -> bool:
    return (folder / FILE).is_file()


def code_of(folder: Path, facts: ExportFacts) -> list[trust.Code]:
    """List the code that reading an export executes: the user's file, and a torch.export program. Raises ModelError."""
    with _read_errors(folder):
        codes: list[trust.Code] = []
        if program := plugins.find(FORMATS, facts.kind).PROGRAM:
            file = export_facts.file_in(folder, program)
            codes.append(trust.Code(str(file), file.stat().st_size, storage.sha256(file), folder))
        for name in dict.fromkeys((facts.model.get("file"), facts.prepare)):
            codes += trust.code_with_imports(export_facts.file_in(folder, name)) if name else []
        return codes


def forward_of(folder: Path, facts: ExportFacts | None = None) -> Forward:
    """Load the forward function of an export, on the CPU: a module in evaluation mode if the format holds one. Raises
    ModelError if the folder is no export, or a damaged one."""
    folder = Path(folder).absolute()
    facts = facts or export_facts.read(folder)
    with _read_errors(folder):
        return plugins.find(FORMATS, facts.kind).read(folder, facts)


def tokenizer_of(folder: Path, facts: ExportFacts) -> Tokenizer | None:
    """Load the tokenizer stored beside the weights; None for models that take no tokens."""
    data = facts.recipe.get("data", {})
    special = data.get("special_tokens_in_text", "as_text")
    if facts.vocabulary is not None:
        with _read_errors(folder):
            # a model that was exported before there was data.add_bos has not learned what begins a text
            options = {"add_bos": data.get("add_bos", False), "special": special}
            saved = saved_tokenizer(str(data["tokenizer"]), folder, **options)
            is_chat = plugins.find("data.sources", data["kind"]).Config.CHATS
            return ChatTokenizer(saved, skips=data.get("on_bad_sample") == "skip") if is_chat else saved
    if facts.modality != "text" or not plugins.find("models", facts.model["kind"]).Config.TAKES_TOKENS:
        return None
    with _read_errors(folder):
        plugin, section = _weights.section_of(facts, folder)
        return plugin.tokenizer(section, facts.spec, special=special)


def processor_of(folder: Path, facts: ExportFacts) -> Processor | None:
    """Load the image processor, the feature extractor or the user's `prepare` stored beside the weights, if any."""
    data = facts.recipe.get("data", {})
    with _read_errors(folder):
        if facts.prepare:
            return preparation_of(export_facts.file_in(folder, facts.prepare))
        if facts.modality == "audio" and "seconds" in data:
            is_none = data["feature_extractor"] == NO_PROCESSOR
            return SoundReader(Waves() if is_none else FeatureExtractor(str(folder)), float(data["seconds"]))
        if facts.image_shape is None or data.get("image_processor", NO_PROCESSOR) == NO_PROCESSOR:
            return None
        return ImageProcessor(str(folder))


def loss_of(folder: Path, facts: ExportFacts, forward: Forward) -> Callable[[Outputs, Batch], LossSum]:
    """Return the model's own loss; for a graph, that of the user's file beside it, else the objective's."""
    if isinstance(forward, Model):
        return forward.loss
    if "file" not in facts.model:
        return facts.learned.loss
    with _read_errors(folder):
        _, section = _weights.section_of(facts, folder)
        return _own_functions.build(section, facts.spec).loss


def metrics_of(folder: Path, facts: ExportFacts) -> dict[str, Any]:
    """Return the user's torchmetrics by name."""
    with _read_errors(folder):
        _, section = _weights.section_of(facts, folder)
        return _own_functions.own_metrics(section, facts.spec)


@contextmanager
def _read_errors(folder: Path) -> Iterator[None]:
    """Turn any error into a ModelError that names the export: every library, and the user's code, raises its own."""
    try:
        storage.check_files(folder)
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
