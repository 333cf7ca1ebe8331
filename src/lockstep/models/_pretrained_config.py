"""Base class of the settings of models from transformers."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from lockstep.models._model_config import ModelSection


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

    LIBRARIES: ClassVar[tuple[str, ...]] = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")

    name: HubName
    """A name on the Hugging Face hub, or a local folder (here or in models/) with a saved model and its tokenizer."""
    revision: str = "main"
    """The hub's branch, tag or commit; a commit can never change."""

    @property
    def base_model(self) -> str | None:
        """The hub name; None for a local folder, whose origin is unknown."""
        return None if Path(self.name).is_absolute() else self.name
