"""What the processes of an evaluation are asked to do, as a file that their launcher hands on."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

SPLITS = ["test", "train"]


class EvaluationRequest(BaseModel):
    """One evaluation."""

    model_config = ConfigDict(frozen=True)

    target: Path
    """A checkpoint, or an export's folder."""
    is_export: bool
    split: str
    file: Path | None
    """A table, or a folder of images, in the place of the split."""
    text_column: str
    label_column: str
    worst: int
    """How many of the samples with the highest loss are shown."""
    calibrates: bool
    to: Path
    """The folder for what comes out."""

    @property
    def data(self) -> str:
        """What the model is measured on, for people."""
        return str(self.file) if self.file else f"the {'training' if self.split == 'train' else 'test'} split"
