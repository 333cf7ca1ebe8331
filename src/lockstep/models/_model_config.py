"""Base class of every model's settings; a model's `Config` overrides what differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lockstep.base.config import PluginSection


class ModelSection(PluginSection):
    """What is trained."""

    PRETRAINED: ClassVar[bool] = False
    """Whether its weights come from a checkpoint."""
    TAKES_TOKENS: ClassVar[bool] = False
    """Whether it has a tokenizer and takes token ids."""
    MEASURES_ITSELF: ClassVar[bool] = False
    """Whether it may define its own metrics, whose names the config cannot be checked against."""
    LIBRARIES: ClassVar[tuple[str, ...]] = ()
    """Modules that it takes seconds to import: done once for all workers, before they start."""
    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings that `lockstep init` writes for it, by section."""

    @property
    def modality(self) -> str:
        """Input type: "image", "text", or "any"."""
        return "any"

    @property
    def code(self) -> Path | None:
        """The user's Python file, if the model comes from one."""
        return None

    @property
    def base_model(self) -> str | None:
        """Hub name of the pretrained model."""
        return None
