"""Findings of `lockstep doctor`, and the request to its processes and their measurements."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

MB = 1e6


class Diagnosis(BaseModel):
    """A finding: one line of cause, one of repair."""

    model_config = ConfigDict(frozen=True)

    code: str
    """Identifier such as LS-NET-03; listed in docs/troubleshooting.md."""
    severity: Literal["error", "warning", "note"]
    """error: the run will not start, or not end well; warning: it will be slow or fragile; note: worth knowing."""
    cause: str
    repair: str
    host: str = ""
    """Name of the machine, where several are examined."""

    @classmethod
    def error(cls, code: str, cause: str, repair: str) -> Self:
        return cls(code=code, severity="error", cause=cause, repair=repair)

    @classmethod
    def warning(cls, code: str, cause: str, repair: str) -> Self:
        return cls(code=code, severity="warning", cause=cause, repair=repair)

    @classmethod
    def note(cls, code: str, cause: str, repair: str) -> Self:
        return cls(code=code, severity="note", cause=cause, repair=repair)


class ExaminationRequest(BaseModel):
    findings: tuple[Diagnosis, ...] = ()
    """Findings on this machine, which the first of its processes passes on to node 0."""


class RankFacts(BaseModel):
    rank: int
    host: str
    processor: str
    """Name of the CPU or the GPU."""
    flops: float
    """Operations per second, in a matrix product at the same time as the other ranks."""
    seconds: dict[str, float]
    """Duration of each collective, by name."""
    links: dict[int, list[float]]
    """Other rank -> [seconds of a round trip of one byte, bytes per second from this rank to the other]."""
    findings: tuple[Diagnosis, ...] = ()
