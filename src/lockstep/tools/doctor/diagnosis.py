"""What `lockstep doctor` finds, and what its processes are asked for and measure."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FACTS = "facts-{}.json"
"""In the run's folder, with the rank."""
MB = 1e6


class Diagnosis(BaseModel):
    """One line of cause, one of repair."""

    model_config = ConfigDict(frozen=True)

    code: str
    """Such as LS-NET-03; listed in docs/troubleshooting.md."""
    severity: Literal["error", "warning", "note"]
    """error: the run will not start, or not end well; warning: it will be slow or fragile; note: worth knowing."""
    cause: str
    repair: str
    host: str = ""
    """The machine, where several are looked at."""


class ExaminationRequest(BaseModel):
    findings: tuple[Diagnosis, ...] = ()
    """Of this machine, which the first of its processes passes on to node 0."""


class RankFacts(BaseModel):
    rank: int
    host: str
    processor: str
    """Its name: of the CPU or the GPU."""
    flops: float
    """Per second, in a matrix product at the same time as the other ranks."""
    seconds: dict[str, float]
    """Of collectives, by name."""
    links: dict[int, list[float]]
    """Other rank -> [seconds of a round trip of one byte, bytes per second from this rank to the other]."""
    findings: tuple[Diagnosis, ...] = ()
