"""How a run of a proof differs from the first one in weights and steps, and why: what is known already, else what
further, traced runs show.

W = processes.
"""

from dataclasses import dataclass

from lockstep.tools.compare.run_evidence import DIGESTS, LOGGED
from lockstep.tools.prove import strategy_choice
from lockstep.tools.prove.proof_runs import ProofRun, ProofRuns
from lockstep.tools.prove.trace_diff import SPREAD, explained, first_difference, read


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """How a run differs from the first one in what it trains."""

    in_weights: bool
    step: int | None
    """The first step whose loss, gradient norm, learning rate or chain differs; None where only the weights do."""
    figures: str = ""
    """The first of these that differs, with both values."""

    @property
    def position(self) -> str:
        return f"from step {self.step} on" if self.step is not None else "after the last step"


def run_difference(one: ProofRun, other: ProofRun) -> RunDifference | None:
    """How two runs differ in weights and steps; None where they are equal, whatever they measured."""
    in_weights = any(one.summary.get(name) != other.summary.get(name) for name in DIGESTS)
    steps = [{line["step"]: line for line in run.metrics if line["kind"] == "step"} for run in (one, other)]
    for number in sorted(steps[0].keys() | steps[1].keys()):
        a, b = (each.get(number, {}) for each in steps)
        if name := next((name for name in LOGGED if a.get(name) != b.get(name)), None):
            figures = f"the {name.replace('_', ' ')} of step {number} is {a.get(name)!r} and {b.get(name)!r}"
            return RunDifference(in_weights=in_weights, step=number, figures=figures)
    return RunDifference(in_weights=True, step=None) if in_weights else None


@dataclass(frozen=True, kw_only=True)
class DifferenceCauses:
    runs: ProofRuns
    repeat_cause: str
    """Why even a repeated micro-batch differs; empty where it does not. Runs then differ for the same reason."""

    def known(self, run: ProofRun, difference: RunDifference) -> str | None:
        """The cause, as far as it can be told without another run."""
        if self.repeat_cause:
            return f"as above: {self.repeat_cause}"
        if finding := run.finding or self.runs.on(1).finding:
            return f"the run has noticed: {finding}"
        if not difference.in_weights:
            return (
                f"the weights are equal, but {difference.figures}: the loss adds something that is no function of the "
                "samples and weights, such as the rank or the time"
            )
        return None

    def of_processes(self, processes: int, difference: RunDifference) -> str:
        """Why a number of processes changes the run: where unknown, run both again, traced and in the exact order."""
        if known := self.known(self.runs.on(processes), difference):
            return known
        request, exact = self.runs.request.model_copy(update={"is_traced": True}), {"run": {"reproducibility": "exact"}}
        one, other = (self.runs.run(f"traced-{number}", number, request, **exact) for number in (1, processes))
        trace = read(one.folder)
        if first := first_difference(trace, read(other.folder)):
            return explained(first, trace, SPREAD)
        if one.digest != other.digest:
            return "all gradients and their sums are equal, but the last step's weights are not: the optimizer differs"
        if self.runs.recipe.run.reproducibility == "fast":
            return (
                "run.reproducibility=fast adds gradients in an order that depends on the number of processes; "
                "with exact, both numbers of processes have just given the same weights"
            )
        return "a second, traced run of both gave the same weights: something differs from run to run, and seldom"

    def of_strategy(self, kind: str, run: ProofRun, difference: RunDifference) -> str:
        if known := self.known(run, difference):
            return known
        if strategy_choice.processes_of(kind) > 1 and (plain := run_difference(self.runs.on(1), self.runs.on(2))):
            own = self.runs.recipe.parallel.kind
            return f"W = 2 differs with parallel.kind={own}, too: {self.of_processes(2, plain)}"
        return f"nothing in the model's code is known that would do it, and {kind} alone differs: please report it"

    def of_kill(self, resumed_on: int, run: ProofRun, difference: RunDifference) -> str:
        if known := self.known(run, difference):
            return known
        for processes in sorted({2, resumed_on} - {1}):
            if plain := run_difference(self.runs.on(1), self.runs.on(processes)):
                return f"W = {processes} differs from W = 1 without a kill, too: {self.of_processes(processes, plain)}"
        return (
            "undisturbed runs are equal on both numbers of processes: something that changes in training is not in the "
            "checkpoint, such as numbers that a module or an observer keeps outside its parameters and buffers"
        )
