"""What the processes of an examination are asked for, and what each of them measures."""

from pydantic import BaseModel

from lockstep.tools.doctor.diagnosis import Diagnosis

FACTS = "facts-{}.json"
"""In the run's folder, with the rank."""
MB = 1e6


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
