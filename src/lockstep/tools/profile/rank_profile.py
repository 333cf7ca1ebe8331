"""The request to the processes of a profile, and the measurements of each."""

from pathlib import Path

from pydantic import BaseModel

from lockstep.observe.profile.operators import Operator

STAGE = "stage"
"""File in the folder of facts with a line on the current stage."""


class ProfileRequest(BaseModel):
    facts: Path
    """Folder for each rank's measurements, and for the stage of rank 0."""
    traces: Path
    """Folder for the traces."""
    warm_up: int
    steps: int
    """Number of steps measured by phase."""
    traced: int
    """Number of steps under the profiler."""


class RankProfile(BaseModel):
    """Measurements of one rank, per step."""

    rank: int
    step_seconds: float
    phases: dict[str, float]
    hidden_seconds: float
    """Time of the exchange of gradients that overlaps the backward pass."""
    delayed_seconds: float
    """Time for which other processes had the training thread's core."""
    micro_batches: int
    peak_bytes: int
    flops: float
    peak_flops: float
    """Operations per second, in a matrix product at the same time as the other ranks."""
    memory: dict[str, int]
    operators: list[dict[str, str | float | int]]
    """Most expensive operators of the traced steps."""

    def top(self) -> list[Operator]:
        return [Operator(**each) for each in self.operators]  # type: ignore[arg-type]
