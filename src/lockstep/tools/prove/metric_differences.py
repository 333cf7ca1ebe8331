"""Whether runs with equal weights have measured the same; if not, which metric is the culprit."""

from collections.abc import Callable, Mapping

from lockstep.core.modules.module_trace import fingerprint, origin
from lockstep.run.recipe import Recipe
from lockstep.tools.prove.proof_runs import ProofRun
from lockstep.tools.prove.proof_table import ProofRow
from lockstep.tools.prove.run_differences import MeasuredRun, measured_apart
from lockstep.training.metrics.classifier_metrics import ClassifierMetric
from lockstep.training.metrics.declared_metrics import DeclaredMetric

WHAT = "runs of equal weights measure the same"


def measured(
    recipe: Recipe,
    one: ProofRun,
    others: Mapping[str, ProofRun],
    *,
    measures: Mapping[str, DeclaredMetric],
    again: Callable[[], ProofRun],
) -> ProofRow:
    """The row about what was measured; `others` are runs with the weights of `one`, by what they are called. `again`
    repeats the first run: asked where something differs."""
    values = [line for line in one.metrics if line["kind"] == "evaluation"]
    how = f"{', '.join(others)}: {', '.join(k for k in one.summary['evaluation'])}, and what is logged of each step"
    for label, other in others.items():
        found = list(measured_apart(one, other))
        if found:
            repeated = {(m.kind, m.name) for m in measured_apart(one, again())}
            cause = explanation(found, label, measures, is_repeated=not {(m.kind, m.name) for m in found} & repeated)
            return ProofRow(what=WHAT, how=how, result="DIFFERS", cause=cause + steering(recipe, found))
    return ProofRow(what=WHAT, how=how, result="shown", digest=fingerprint(values))


def explanation(
    found: list[MeasuredRun], label: str, measures: Mapping[str, DeclaredMetric], *, is_repeated: bool
) -> str:
    """What differs, of whom it is, and why."""
    evaluated = [each for each in found if each.kind == "evaluation"]
    names = list(dict.fromkeys(each.name for each in evaluated))
    first = next((each for each in evaluated if each.name == "loss"), (evaluated or found)[0])
    figures = f"after step {first.step} it is {first.one!r}, and {first.other!r} with {label}"
    if "loss" in names:
        rest = f" (and with it {', '.join(name for name in names if name != 'loss')})" if len(names) > 1 else ""
        what = f"the loss of the evaluation{rest} differs: {figures}; the weights are equal. The model in evaluation"
    elif not evaluated:
        sums = ", ".join(dict.fromkeys(each.name for each in found))
        what = f"what comes with the loss ({sums}) differs: {figures}; the weights and the loss are equal. It"
    else:
        which, is_one = ", ".join(described(name, measures) for name in names), len(names) == 1
        what = f"the metric{'' if is_one else 's'} {which} differ{'s' if is_one else ''}: {figures}; the weights are "
        what += "equal. What computes it"
    if is_repeated:
        return f"{what} depends on the process (its rank, the number of processes, the environment)"
    return f"{what} gives something else in one process again, too: it asks for the time, or draws random numbers"


def described(name: str, measures: Mapping[str, DeclaredMetric]) -> str:
    """A measured value by its name, with the class, file and line of a metric of the user's own."""
    measure = measures.get(name) or measures.get(name.partition(".")[0])
    if measure is None or isinstance(measure.metric, ClassifierMetric):
        return f"`{name}`"
    if type(measure.metric).__module__.split(".")[0] == "torchmetrics":
        return f"`{name}` ({type(measure.metric).__name__})"
    return f"`{name}` ({origin(measure.metric)})"


def steering(recipe: Recipe, found: list[MeasuredRun]) -> str:
    """What a run decides by one of these values, if anything."""
    names = {each.name for each in found if each.kind == "evaluation"}
    told = []
    if recipe.train.stop_metric in names:
        told.append(
            f". train.stop_metric={recipe.train.stop_metric} ends a run by it, so that the weights of a whole run "
            "depend on it, too; in this proof it steered nothing"
        )
    if recipe.checkpoint.best in names:
        told.append(f". checkpoint.best={recipe.checkpoint.best} keeps a checkpoint by it")
    return "".join(told)
