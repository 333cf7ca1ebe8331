"""Options of an evaluation, and the request that its processes read from a file."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

SPLITS = ["test", "train"]


class EvaluateOptions(BaseModel):
    model_config = ConfigDict(frozen=True)

    split: str = "test"
    file: Path | None = None
    """A table, or a folder of images, instead of the split."""
    worst: int = 20
    """Number of samples with the highest loss to show."""
    calibrates: bool = False
    to: Path | None = None
    """Output folder; by default that of the run or the export."""
    base: str | None = None
    """Current place of the model of an exported adapter, a folder or a name on the hub."""
    trusts: bool = False
    """Whether to execute the target's own code even if it is unknown."""


class EvaluationRequest(EvaluateOptions):
    target: Path
    """A checkpoint, or an export's folder."""
    is_export: bool
    text_column: str
    label_column: str
    to: Path

    @property
    def data(self) -> str:
        """Description of the samples for the user."""
        return str(self.file) if self.file else f"the {'training' if self.split == 'train' else 'test'} split"
