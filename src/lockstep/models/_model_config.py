"""The settings of a model, with what a recipe has to know of it: its own class overrides what is different."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lockstep.base.config import PluginSection


class ModelSection(PluginSection):
    """What is trained."""

    PRETRAINED: ClassVar[bool] = False
    """Whether its weights come from a file."""
    TAKES_TOKENS: ClassVar[bool] = False
    """Whether it has a tokenizer, and takes texts as tokens."""
    MEASURES_ITSELF: ClassVar[bool] = False
    """Whether it may have metrics of its own, whose names are not known beforehand."""
    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What `lockstep init` writes with it, by section."""

    @property
    def modality(self) -> str:
        """What it takes: "image", "text", or "any"."""
        return "any"

    @property
    def code(self) -> Path | None:
        """The user's own Python file, if it is one."""
        return None

    @property
    def base_model(self) -> str | None:
        """The hub's name of what is trained on."""
        return None
