"""The request that the processes of an evaluation read from a file."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

SPLITS = ["test", "train"]


class EvaluationRequest(BaseModel):
    model_config = ConfigDict(frozen=True)

    target: Path
    """A checkpoint, or an export's folder."""
    is_export: bool
    split: str
    file: Path | None
    """A table, or a folder of images, instead of the split."""
    text_column: str
    label_column: str
    worst: int
    """Number of samples with the highest loss to show."""
    calibrates: bool
    base: str | None = None
    """See EvaluateOptions."""
    to: Path
    """Output folder."""

    @property
    def data(self) -> str:
        """Description of the samples for the user."""
        return str(self.file) if self.file else f"the {'training' if self.split == 'train' else 'test'} split"
