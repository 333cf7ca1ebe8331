"""Whether runs with equal weights measured the same; if not, which metric is to blame."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.modules.module_trace import fingerprint, origin
from lockstep.run.recipe import Recipe
from lockstep.tools.compare.run_evidence import LOGGED
from lockstep.tools.prove.proof_runs import ProofRun
from lockstep.tools.prove.proof_table import ProofRow
from lockstep.training.metrics.declared_metrics import DeclaredMetric
from lockstep.training.metrics.summed_metric import SummedMetric

WHAT = "runs of equal weights measure the same"
NOT_MEASURED = {"kind", "step", "epoch", "samples"}
UNCOMPARED = {"step": {*LOGGED, *NOT_MEASURED}, "evaluation": NOT_MEASURED}
"""Fields of each kind of line that are no metrics, or are compared separately."""


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    kind: str
    """evaluation, or step: a sum that comes with the loss."""
    step: int
    name: str
    one: Any
    other: Any


def metric_differences(one: ProofRun, other: ProofRun) -> Iterator[MetricDifference]:
    """What was measured in evaluations, or logged beside the loss, and differs, in the order of the runs' lines."""
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
    """The row about metrics; `others` are runs with the weights of `one`, by label. `repeat` runs `one` again, which is
    needed only where something differs."""
    how = f"{', '.join(others)}: {', '.join(one.summary['evaluation'])}, and what is logged of each step"
    for label, other in others.items():
        if differences := list(metric_differences(one, other)):
            names = {(each.kind, each.name) for each in differences}
            is_stable = names.isdisjoint((each.kind, each.name) for each in metric_differences(one, repeat()))
            cause = explanation(differences, label, measures, is_stable=is_stable) + consequences(recipe, differences)
            return ProofRow(what=WHAT, how=how, result="DIFFERS", cause=cause)
    values = [line for line in one.metrics if line["kind"] == "evaluation"]
    return ProofRow(what=WHAT, how=how, result="shown", digest=fingerprint(values))


def explanation(
    differences: list[MetricDifference], label: str, measures: Mapping[str, DeclaredMetric], *, is_stable: bool
) -> str:
    """What differs and why; `is_stable`: the first run gave the same values when it was repeated."""
    evaluated = [each for each in differences if each.kind == "evaluation"]
    names = list(dict.fromkeys(each.name for each in evaluated))
    first = next((each for each in evaluated if each.name == "loss"), (evaluated or differences)[0])
    figures = f"after step {first.step} it is {first.one!r}, and {first.other!r} with {label}"
    if "loss" in names:
        rest = f" (and with it {', '.join(name for name in names if name != 'loss')})" if len(names) > 1 else ""
        what = f"the loss of the evaluation{rest} differs: {figures}; the weights are equal. The model in evaluation"
    elif not evaluated:
        sums = ", ".join(dict.fromkeys(each.name for each in differences))
        what = f"what comes with the loss ({sums}) differs: {figures}; the weights and the loss are equal. It"
    else:
        which, is_one = ", ".join(described(name, measures) for name in names), len(names) == 1
        what = f"the metric{'' if is_one else 's'} {which} differ{'s' if is_one else ''}: {figures}; the weights are "
        what += "equal. What computes it"
    if is_stable:
        return f"{what} depends on the process (its rank, the number of processes, the environment)"
    return f"{what} gives something else in one process again, too: it asks for the time, or draws random numbers"


def described(name: str, measures: Mapping[str, DeclaredMetric]) -> str:
    """A metric by its name; one of the user's own with class, file and line."""
    measure = measures.get(name) or measures.get(name.partition(".")[0])
    if measure is None or isinstance(measure.metric, SummedMetric):
        return f"`{name}`"
    if type(measure.metric).__module__.split(".")[0] == "torchmetrics":
        return f"`{name}` ({type(measure.metric).__name__})"
    return f"`{name}` ({origin(measure.metric)})"


def consequences(recipe: Recipe, differences: list[MetricDifference]) -> str:
    """What a run decides by one of these metrics, if anything."""
    names = {each.name for each in differences if each.kind == "evaluation"}
    text = ""
    if recipe.train.stop_metric in names:
        text += (
            f". train.stop_metric={recipe.train.stop_metric} ends a run by it, so that the weights of a whole run "
            "depend on it, too; in this proof it ended none"
        )
    if recipe.checkpoint.best in names:
        text += f". checkpoint.best={recipe.checkpoint.best} keeps a checkpoint by it"
    return text
