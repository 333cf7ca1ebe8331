"""What the processes of a profile are asked for, and what each of them has measured."""

from pathlib import Path

from pydantic import BaseModel

from lockstep.observe.profile.operators import Operator

STAGE = "stage"
"""In the folder of facts: a line on what is done now."""


class ProfileRequest(BaseModel):
    """What the processes are asked to do."""

    facts: Path
    """Folder for what each rank has measured, and for the stage that rank 0 is in."""
    traces: Path
    """Folder for the traces."""
    warm_up: int
    steps: int
    """How many are measured by phase."""
    traced: int
    """How many run under the profiler."""


class RankProfile(BaseModel):
    """What one rank has measured, per step."""

    rank: int
    step_seconds: float
    phases: dict[str, float]
    hidden_seconds: float
    """For which gradients were exchanged beside the backward pass."""
    delayed_seconds: float
    """For which other processes had the training thread's core."""
    micro_batches: int
    peak_bytes: int
    flops: float
    peak_flops: float
    """Per second, in a matrix product at the same time as the other ranks."""
    memory: dict[str, int]
    operators: list[dict[str, str | float | int]]
    """Of the traced steps."""

    def top(self) -> list[Operator]:
        return [Operator(**each) for each in self.operators]  # type: ignore[arg-type]
