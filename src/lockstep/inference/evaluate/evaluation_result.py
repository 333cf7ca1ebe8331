"""The result of an evaluation, read from its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    folder: Path
    """Folder of evaluation.json, evaluation.html and, for classes, confusion.svg."""
    metrics: dict[str, float]
    """Metrics by name: "loss" and those of the objective, such as "accuracy"."""
    samples: int
    step: int
    """Step of the checkpoint."""
    digest: str
    """Digest of the weights."""
    details: dict[str, Any]
    """Contents of evaluation.json: also the metrics of each class, the calibration, the worst samples."""

    @property
    def report(self) -> Path:
        """The page for a browser."""
        return self.folder / "evaluation.html"


def read(folder: Path) -> EvaluationResult:
    """Read the results that an evaluation has written into a folder."""
    found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    named = {name: found[name] for name in ("metrics", "samples", "step", "digest")}
    return EvaluationResult(folder=folder, details=found, **named)
