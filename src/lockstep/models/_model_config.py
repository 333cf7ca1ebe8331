"""Base classes of models' settings, those from transformers among them; a model's `Config` overrides what differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from lockstep.base import plugins
from lockstep.base.config import MANY, LocalPath, PluginSection, Section
from lockstep.base.errors import nearest
from lockstep.base.name_patterns import Patterns
from lockstep.base.remote_path import DataPath


class AdapterSection(Section):
    """Train small matrices beside frozen weights, by the library peft."""

    kind: Literal["lora", "loha", "lokr", "ia3"] = "lora"
    """lora (E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021), or another method of peft; dora
    and rslora are options of lora: {use_dora: true}, {use_rslora: true}."""
    rank: int = Field(8, ge=1, le=2**16)
    """Inner size of the matrices; ia3 has none."""
    alpha: float | None = Field(None, gt=0, le=2**16)
    """Their product is scaled by alpha / rank; by default 2, whatever the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the inputs of the matrices; lora only."""
    targets: Patterns = ()
    """Layers that get an adapter: names of modules or their ends, such as q_proj, shell patterns of them, such as
    "*.q_proj", a regular expression, or all-linear, which is all but the head; by default all linear layers of the
    numbered layers, such as those of attention and feed-forward blocks."""
    train: Patterns = ()
    """Names of parameters or modules that are trained besides, as a whole and in place of an adapter; what is tied to
    them stays so. A new head always is."""
    options: dict[str, Any] = {}
    """Further arguments of peft's config class."""


class ModelSection(PluginSection):
    """The model that is trained."""

    incidental: ClassVar[frozenset[str]] = frozenset({"init"})  # the digest of its weights is a fact of the run

    modality: ClassVar[str] = "any"
    """Input type: "image", "audio", "text", or "any"."""
    PRETRAINED: ClassVar[bool] = False
    """Whether its weights come from a checkpoint."""
    HAS_NEW_HEAD: ClassVar[bool] = False
    """Whether a pretrained body of transformers gets a head for the data's targets."""
    TAKES_TOKENS: ClassVar[bool] = False
    """Whether it has a tokenizer and takes token ids."""
    LIBRARIES: ClassVar[tuple[str, ...]] = ()
    """Modules whose import takes seconds: done once for all workers, before they start."""
    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings that `lockstep init` writes for it, by section."""

    objective: str = "auto"
    """Objective: classification, multilabel, regression, token_classification, causal_lm, or own, which the loss in the
    model's file defines. auto: the one that the data has targets for."""

    file: LocalPath | None = None
    """A Python file with `loss(outputs, batch)` or `metrics(spec)` in place of, or beside, those of the objective;
    `optimizer` and `schedule` may lie there, too."""
    init: DataPath | None = None
    """Source of the first weights (a warm start): a run, a checkpoint, an export, a folder with *.safetensors, or a
    file of weights, or a URL of one. Those that have a name and a shape of the model's are copied; the others are
    reported."""
    adapter: AdapterSection | None = None
    """Train an adapter beside frozen weights: {kind: lora, rank: 8} and more (extra `adapters`)."""
    freeze: Patterns = ()
    """Parameters that are not trained: names of them or of modules, or shell patterns of them, such as "encoder" or
    "*.layer.[0-3]"."""

    unfreeze: dict[str, Annotated[int, Field(ge=1, le=MANY)]] = {}
    """Parameters that are trained only from a step on: {"encoder": 500} leaves them as they are in the first 500 steps.
    Names and patterns as in `freeze`; their gradients are computed, and dropped, from the start."""

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, name: str) -> str:
        known = ["auto", *plugins.names("models.objectives")]
        if name not in known:
            raise ValueError(f"there is no objective {name!r}{nearest(name, known)} (there is: {', '.join(known)})")
        return name

    def own(self, setting: str) -> str | None:
        """Return the hub name or folder that "auto" stands for in this setting of the data; None without one."""
        return None

    @property
    def code(self) -> Path | None:
        """The user's Python file, if the model, its loss or its metrics come from one."""
        return self.file

    @property
    def base_model(self) -> str | None:
        """Hub name of the pretrained model."""
        return None


def _absolute_folder(name: str) -> str:
    """Resolve a folder of this name, here or in models/, to its absolute path; return any other name unchanged."""
    for folder in (Path(name).expanduser(), Path("models") / name):
        if folder.is_dir():
            return str(folder.absolute())
    return name


HubName = Annotated[str, AfterValidator(_absolute_folder)]
"""A name on the hub, or the absolute path of a folder."""


class PretrainedSection(ModelSection):
    """A model from the hub or a folder."""

    PRETRAINED = True
    LIBRARIES = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
    OWN: ClassVar[str] = ""
    """Setting of the data in which "auto" stands for what was saved with the model, such as "tokenizer"."""

    name: HubName
    """A name on the Hugging Face hub, or a local folder (here or in models/) with a saved model and its tokenizer."""
    revision: str = "main"
    """The hub's branch, tag or commit; a commit can never change."""

    def own(self, setting: str) -> str | None:
        return self.name if setting == self.OWN else None

    @property
    def base_model(self) -> str | None:
        """The hub name; None for a local folder, whose origin is unknown."""
        return None if Path(self.name).is_absolute() else self.name


class TokensSection(PretrainedSection):
    """A model of tokens."""

    resize_embeddings: bool = False
    """Whether embeddings, and the output layer of a language model, get a row for each token that only the tokenizer
    has, such as a padding token that was added to it. The new rows are drawn around the mean of the others."""

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if self.resize_embeddings and self.adapter:
            raise ValueError(
                "model.resize_embeddings does not go with model.adapter, which leaves embeddings as they are and whose "
                "files fit the model of before: train without the adapter, or save the model with resized embeddings "
                "first (transformers: resize_token_embeddings) and name that one"
            )
        return self
