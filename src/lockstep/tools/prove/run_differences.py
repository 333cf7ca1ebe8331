"""Finds how a run of a proof differs from the first one, and why: in weights and steps, from known causes or from
further, traced runs; where weights are equal, in its metrics.

W = processes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.modules.module_trace import fingerprint, origin
from lockstep.models.metrics.declared_metrics import DeclaredMetric, SummedMetric
from lockstep.recipe.recipe import Recipe
from lockstep.tools.compare.run_evidence import DIGESTS, LOGGED
from lockstep.tools.prove.proof_runs import ProofRun, ProofRuns, processes_of
from lockstep.tools.prove.proof_table import ProofRow
from lockstep.tools.prove.trace_diff import SPREAD, explained, first_difference, read

EQUAL_MEASURES = "runs of equal weights measure the same"
NOT_MEASURED = {"kind", "step", "epoch", "samples"}
UNCOMPARED = {"step": {*LOGGED, *NOT_MEASURED}, "evaluation": NOT_MEASURED}
"""Fields of each kind of line that are no metrics, or are compared separately."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """How a run differs from the first one in what it trains."""

    in_weights: bool
    step: int | None
    """The first step whose loss, gradient norm, learning rate or chain differs; None where only the weights do."""
    figures: str = ""
    """First quantity that differs, with both values."""


def run_difference(one: ProofRun, other: ProofRun) -> RunDifference | None:
    """Return how two runs differ in weights and steps; None where they are equal, even if other metrics differ."""
    in_weights = any(one.summary.get(name) != other.summary.get(name) for name in DIGESTS)
    steps = [{line["step"]: line for line in run.metrics if line["kind"] == "step"} for run in (one, other)]
    for number in sorted(steps[0].keys() | steps[1].keys()):
        a, b = (each.get(number, {}) for each in steps)
        if name := next((name for name in LOGGED if a.get(name) != b.get(name)), None):
            figures = f"the {name.replace('_', ' ')} of step {number} is {a.get(name)!r} and {b.get(name)!r}"
            return RunDifference(in_weights=in_weights, step=number, figures=figures)
    return RunDifference(in_weights=True, step=None) if in_weights else None


def known_cause(runs: ProofRuns, run: ProofRun, difference: RunDifference) -> str | None:
    """Return the cause, if it is known without another run."""
    if runs.repeat_cause:
        return f"as above: {runs.repeat_cause}"
    if finding := run.finding or runs.on(1).finding:
        return f"the run has noticed: {finding}"
    if not difference.in_weights:
        return (
            f"the weights are equal, but {difference.figures}: the loss adds something that is no function of the "
            "samples and weights, such as the rank or the time"
        )
    return None


def cause_by_processes(runs: ProofRuns, processes: int, difference: RunDifference) -> str:
    """Find why a number of processes changes the run: where unknown, run both again, traced, in the exact order."""
    if known := known_cause(runs, runs.on(processes), difference):
        return known
    request, exact = runs.request.model_copy(update={"is_traced": True}), {"run": {"reproducibility": "exact"}}
    one, other = (runs.run(f"traced-{n}", n, request=request, changes=exact) for n in (1, processes))
    trace = read(one.folder)
    if first := first_difference(trace, read(other.folder)):
        return explained(first, trace, SPREAD)
    if one.digest != other.digest:
        return "all gradients and their sums are equal, but the last step's weights are not: the optimizer differs"
    if runs.recipe.run.reproducibility == "fast":
        what = "run.reproducibility=fast adds gradients in an order that depends on the number of processes"
        return f"{what}; with exact, both numbers of processes have just given the same weights"
    return "a second, traced run of both gave the same weights: something differs from run to run, and seldom"


def cause_by_strategy(runs: ProofRuns, kind: str, run: ProofRun, *, difference: RunDifference) -> str:
    if known := known_cause(runs, run, difference):
        return known
    if processes_of(kind) > 1 and (plain := run_difference(runs.on(1), runs.on(2))):
        own = runs.recipe.parallel.kind
        return f"W = 2 differs with parallel.kind={own}, too: {cause_by_processes(runs, 2, plain)}"
    return f"nothing in the model's code is known that would do it, and {kind} alone differs: please report it"


def cause_by_kill(runs: ProofRuns, resumed_on: int, run: ProofRun, *, difference: RunDifference) -> str:
    if known := known_cause(runs, run, difference):
        return known
    for processes in sorted({2, resumed_on} - {1}):
        if plain := run_difference(runs.on(1), runs.on(processes)):
            return (
                f"W = {processes} differs from W = 1 without a kill, too: {cause_by_processes(runs, processes, plain)}"
            )
    return (
        "undisturbed runs are equal on both numbers of processes: something that changes in training is not in the "
        "checkpoint, such as numbers that a module or an observer keeps outside its parameters and buffers"
    )


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    kind: str
    """evaluation, or step: a sum that comes with the loss."""
    step: int
    name: str
    one: Any
    other: Any


def metric_differences(one: ProofRun, other: ProofRun) -> Iterator[MetricDifference]:
    """Yield metrics of evaluations, or logged beside the loss, that differ, in the order of the runs' lines."""
    for a, b in zip(one.metrics, other.metrics, strict=False):
        kind, step = a["kind"], a["step"]
        for name in dict.fromkeys([*a, *b]):
            if name not in UNCOMPARED[kind] and a.get(name) != b.get(name):
                yield MetricDifference(kind=kind, step=step, name=name, one=a.get(name), other=b.get(name))


def metric_row(
    recipe: Recipe,
    one: ProofRun,
    others: Mapping[str, ProofRun],
    *,
    measures: Mapping[str, DeclaredMetric],
    repeat: Callable[[], ProofRun],
) -> ProofRow:
    """Return the row about metrics; `others` are runs with the weights of `one`, by label. `repeat` runs `one` again,
    which is needed only where something differs."""
    how = f"{', '.join(others)}: {', '.join(one.summary['evaluation'])}, and what is logged of each step"
    for label, other in others.items():
        if differences := list(metric_differences(one, other)):
            names = {(each.kind, each.name) for each in differences}
            cause = explanation(differences, label, measures)
            if names.isdisjoint((each.kind, each.name) for each in metric_differences(one, repeat())):
                cause += " depends on the process (its rank, the number of processes, the environment)"
            else:
                cause += (
                    " gives something else in one process again, too: it asks for the time, or draws random numbers"
                )
            cause += consequences(recipe, {name for kind, name in names if kind == "evaluation"})
            return ProofRow(what=EQUAL_MEASURES, how=how, result="DIFFERS", cause=cause)
    values = [line for line in one.metrics if line["kind"] == "evaluation"]
    return ProofRow(what=EQUAL_MEASURES, how=how, result="shown", digest=fingerprint(values))


def explanation(differences: list[MetricDifference], label: str, measures: Mapping[str, DeclaredMetric]) -> str:
    """Describe what differs: metrics, else sums that come with the loss. The last word is the subject of the cause."""
    evaluated = [each for each in differences if each.kind == "evaluation"]
    names = list(dict.fromkeys(described(each.name, measures) for each in evaluated or differences))
    first = next((each for each in evaluated if each.name == "loss"), (evaluated or differences)[0])
    plural = ("", "s") if len(names) == 1 else ("s", "")
    what = f"the metric{plural[0]} {', '.join(names)} differ{plural[1]}"
    if not evaluated:
        what = f"what comes with the loss ({', '.join(names)}) differs"
    figures = f"after step {first.step} it is {first.one!r}, and {first.other!r} with {label}"
    subject = "The model in evaluation" if evaluated and first.name == "loss" else "What computes it"
    return f"{what}: {figures}; the weights are equal. {subject}"


def described(name: str, measures: Mapping[str, DeclaredMetric]) -> str:
    """Describe a metric by its name; one of the user's own with class, file and line."""
    measure = measures.get(name) or measures.get(name.partition(".")[0])
    if measure is None or isinstance(measure.metric, SummedMetric):
        return f"`{name}`"
    is_known = type(measure.metric).__module__.split(".")[0] == "torchmetrics"
    return f"`{name}` ({type(measure.metric).__name__ if is_known else origin(measure.metric)})"


def consequences(recipe: Recipe, names: set[str]) -> str:
    """Describe what a run decides by one of these metrics, if anything."""
    text, stop, best = "", recipe.train.stop_metric, recipe.checkpoint.best
    if stop in names:
        text += f". train.stop_metric={stop} ends a run by it, so that the weights of a whole run depend on it, too"
    return text + (f". checkpoint.best={best} keeps a checkpoint by it" if best in names else "")
