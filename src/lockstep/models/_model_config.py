"""Base class of every model's settings; a model's `Config` overrides what differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from lockstep.base import plugins
from lockstep.base.config import PluginSection
from lockstep.base.errors import nearest
from lockstep.base.name_patterns import Patterns
from lockstep.base.remote_path import DataPath
from lockstep.models._adapter_config import AdapterSection


class ModelSection(PluginSection):
    """What is trained."""

    incidental: ClassVar[frozenset[str]] = frozenset({"init"})  # the digest of its weights is a fact of the run

    PRETRAINED: ClassVar[bool] = False
    """Whether its weights come from a checkpoint."""
    HAS_NEW_HEAD: ClassVar[bool] = False
    """Whether a pretrained body of transformers gets a head for the data's targets."""
    TAKES_TOKENS: ClassVar[bool] = False
    """Whether it has a tokenizer and takes token ids."""
    MEASURES_ITSELF: ClassVar[bool] = False
    """Whether it may define its own metrics, whose names the config cannot be checked against."""
    LIBRARIES: ClassVar[tuple[str, ...]] = ()
    """Modules that it takes seconds to import: done once for all workers, before they start."""
    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings that `lockstep init` writes for it, by section."""

    objective: str = "auto"
    """What is learned: classification, multilabel, regression, token_classification, causal_lm, or own, what the loss
    in the model's file says. auto: what the data has targets for."""

    init: DataPath | None = None
    """Where to take the first weights from (a warm start): a run, a checkpoint, an export, a folder with *.safetensors,
    or a file of weights, or a URL of one. Those that have a name and a shape of the model's are copied; the others are
    reported."""
    adapter: AdapterSection | None = None
    """Train an adapter beside frozen weights: {kind: lora, rank: 8} and more (extra `adapters`)."""
    freeze: Patterns = ()
    """Parameters that are not trained: names of them or of modules, or shell patterns of them, such as "encoder" or
    "*.layer.[0-3]"."""

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, name: str) -> str:
        known = ["auto", *plugins.names("models.objectives")]
        if name not in known:
            raise ValueError(f"there is no objective {name!r}{nearest(name, known)} (there is: {', '.join(known)})")
        return name

    @property
    def modality(self) -> str:
        """Input type: "image", "audio", "text", or "any"."""
        return "any"

    @property
    def own_tokenizer(self) -> str | None:
        """Hub name or folder of the tokenizer that it was trained with, which data.tokenizer=auto stands for."""
        return None

    @property
    def own_image_processor(self) -> str | None:
        """Hub name or folder of the image processor saved with it, which data.image_processor=auto stands for."""
        return None

    @property
    def own_feature_extractor(self) -> str | None:
        """Hub name or folder of the feature extractor saved with it, which data.feature_extractor=auto stands for."""
        return None

    @property
    def code(self) -> Path | None:
        """The user's Python file, if the model comes from one."""
        return None

    @property
    def base_model(self) -> str | None:
        """Hub name of the pretrained model."""
        return None
