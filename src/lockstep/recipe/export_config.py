"""The settings of an export."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lockstep.base import plugins
from lockstep.base.config import Section
from lockstep.base.errors import ConfigError, nearest

FORMATS = "inference.export.formats"
LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2,3}(-[A-Za-z0-9]{2,8})*$")]
"""ISO 639, optionally with a script or region."""
DType = Literal["fp32", "fp16", "bf16", "int8"]


def _known(kind: str) -> str:
    known = plugins.names(FORMATS)
    if kind not in known:
        raise ValueError(f"there is no export {kind!r}{nearest(kind, known)} (there is: {', '.join(known)})")
    return kind


class ExportSection(Section):
    """Format and metadata of the export that `lockstep export` writes."""

    kind: Annotated[str, AfterValidator(_known)] = "pretrained"
    """pretrained: transformers' own layout, or safetensors with a loader; safetensors and state_dict: the unwrapped
    weights; onnx: for onnxruntime; torch_export: a torch.export program. The last two run without the model's code.
    adapter: what model.adapter has trained, alone, for peft; the others hold the model with its adapter merged in."""
    dtype: DType = "fp32"
    """Dtype of the weights: fp32, fp16, bf16, or int8 (onnx only: dynamic quantisation). For less than fp32 the whole
    test split is predicted with both, and the differences are recorded."""
    file: str = Field("model.pt", pattern=r"^[\w-][\w.-]*\.(pt|pth|bin|ckpt)$")
    """Name of the file for state_dict, such as distilbert_agnews.pt: it ends in .pt, .pth, .bin or .ckpt."""

    license: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """License in the card, an identifier of the hub such as mit, apache-2.0 or other."""
    language: tuple[LanguageCode, ...] = ()
    """Languages of the texts in the card, such as [en, de]; by default those of the data set, if known."""
    base_model: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Model on the hub that training started from, for the card; by default model.name if the hub has it."""

    @property
    def folder(self) -> str:
        """Name of the export's folder, in the run's folder."""
        differing = [value for value in (self.kind, self.dtype) if value not in ("pretrained", "fp32")]
        return "-".join(["export", *differing])


def check(section: ExportSection) -> None:
    """Raise ConfigError if the format does not support the dtype or the file name."""
    plugin = plugins.find(FORMATS, section.kind)
    if section.dtype not in plugin.DTYPES:
        supported = ", ".join(plugin.DTYPES)
        raise ConfigError(f"export.kind={section.kind} cannot hold {section.dtype}; it can hold {supported}")
    if plugin.FILE is not None and section.file != ExportSection.model_fields["file"].default:
        raise ConfigError(f"export.file names the file of state_dict; export.kind={section.kind} writes {plugin.FILE}")
