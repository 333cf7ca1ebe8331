"""What the front end of `estimate` asks of a measuring process."""

from pathlib import Path

from pydantic import BaseModel


class MeasurementRequest(BaseModel):
    """What is asked of a measuring process."""

    to: Path
    """The folder for what it finds."""
    seconds: float
    """How long steps are timed, at least."""
    strategies: tuple[str, ...] = ()
    """Try these together with the other processes; empty: measure, each process for itself."""
