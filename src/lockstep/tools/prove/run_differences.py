"""What two ended runs of a proof differ in: weights, steps, and what was measured beside them, each by itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.tools.compare.run_evidence import DIGESTS, LOGGED, PLACE
from lockstep.tools.prove.proof_runs import ProofRun

BESIDE = {"step": {*LOGGED, *PLACE}, "evaluation": {*PLACE}}
"""Of each kind of line, what is not measured, or is compared by itself."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How a run differs from the first one in what it trains."""

    has_other_weights: bool
    step: int | None
    """The first step whose loss, gradient norm, learning rate or chain differs; None where only the weights do."""
    figures: str = ""
    """The first of these that differs, with both values."""

    @property
    def place(self) -> str:
        return f"from step {self.step} on" if self.step is not None else "after the last step"


def apart(one: ProofRun, other: ProofRun) -> Apart | None:
    """How two runs differ in weights and steps; None where they are equal, whatever they measured."""
    has_other_weights = any(one.summary.get(name) != other.summary.get(name) for name in DIGESTS)
    steps = [{line["step"]: line for line in run.metrics if line["kind"] == "step"} for run in (one, other)]
    for number in sorted(steps[0].keys() | steps[1].keys()):
        a, b = (each.get(number, {}) for each in steps)
        if name := next((name for name in LOGGED if a.get(name) != b.get(name)), None):
            figures = f"the {name.replace('_', ' ')} of step {number} is {a.get(name)!r} and {b.get(name)!r}"
            return Apart(has_other_weights=has_other_weights, step=number, figures=figures)
    return Apart(has_other_weights=True, step=None) if has_other_weights else None


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A value that two runs have measured differently."""

    kind: str
    """evaluation, or step: a sum that comes with the loss."""
    step: int
    name: str
    one: Any
    other: Any


def measured_apart(one: ProofRun, other: ProofRun) -> Iterator[MeasuredRun]:
    """What was measured in evaluations, or logged beside the loss, and differs; in the order of the runs' lines."""
    for a, b in zip(one.metrics, other.metrics, strict=False):
        kind, step = a["kind"], a["step"]
        for name in dict.fromkeys([*a, *b]):
            if name not in BESIDE[kind] and a.get(name) != b.get(name):
                yield MeasuredRun(kind=kind, step=step, name=name, one=a.get(name), other=b.get(name))
