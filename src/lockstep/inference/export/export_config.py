"""The settings of an export."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lockstep.base import plugins
from lockstep.base.config import Section
from lockstep.base.errors import ConfigError, nearest

FORMATS = "inference.export.formats"
LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2,3}(-[A-Za-z0-9]{2,8})*$")]
"""ISO 639, with a script or region where need be."""
DType = Literal["fp32", "fp16", "bf16", "int8"]


def _known(kind: str) -> str:
    known = plugins.names(FORMATS)
    if kind not in known:
        raise ValueError(f"there is no export {kind!r}{nearest(kind, known)} (there is: {', '.join(known)})")
    return kind


class ExportSection(Section):
    """What `lockstep export` writes."""

    kind: Annotated[str, AfterValidator(_known)] = "pretrained"
    """pretrained: transformers' own layout, or safetensors with a loader; safetensors and state_dict: the unwrapped
    weights; onnx: for onnxruntime; torch_export: a torch.export program. The last two run without the model's code."""
    dtype: DType = "fp32"
    """What the weights become: fp32, fp16, bf16, or int8 (onnx only: dynamic quantisation). For less than fp32 the
    whole test split is predicted with both, and what is lost is written down."""
    file: str = Field("model.pt", pattern=r"^[\w-][\w.-]*\.(pt|pth|bin|ckpt)$")
    """Name of the file for state_dict, such as distilbert_agnews.pt: it ends in .pt, .pth, .bin or .ckpt."""

    license: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """What the card says others may do with the model, in the hub's words, such as mit, apache-2.0 or other."""
    language: tuple[LanguageCode, ...] = ()
    """Languages of its texts, such as [en, de], for the card; by default those that the data set is known to have."""
    base_model: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """The model on the hub that this one was trained from, for the card; by default model.name if the hub has it."""

    @property
    def folder(self) -> str:
        """The folder of such an export in a run's folder."""
        return "-".join(["export", *([self.kind] if self.kind != "pretrained" else []), *self._reduced])

    @property
    def _reduced(self) -> list[str]:
        return [self.dtype] if self.dtype != "fp32" else []


def check(section: ExportSection) -> None:
    """Raise ConfigError where the format cannot hold such weights, or has its own name for the file."""
    style = plugins.find(FORMATS, section.kind)
    if section.dtype not in style.DTYPES:
        can = ", ".join(style.DTYPES)
        raise ConfigError(f"export.kind={section.kind} cannot hold {section.dtype}; it can hold {can}")
    if style.FILE is not None and section.file != ExportSection.model_fields["file"].default:
        raise ConfigError(f"export.file names the file of state_dict; export.kind={section.kind} writes {style.FILE}")


def file_of(section: ExportSection) -> str:
    """Name of the file that holds the weights."""
    return plugins.find(FORMATS, section.kind).FILE or section.file
