"""Metrics by name: those that a user's file declares, and what is always measured of a classifier."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Outputs
from lockstep.core.modules.outputs import logits_of
from lockstep.training.metrics.classifier_metrics import classifier_metrics

LABEL = "label"
EXAMPLE = "return {NAME: (METRIC, lambda outputs, batch: (outputs, batch[COLUMN]))} from metrics(spec)"

Arguments = Callable[[Outputs, Batch], Any]
"""(outputs, batch) -> what a metric's update() takes: a tuple, or a dict of keywords; None: nothing of this batch."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A metric, and what it is shown of each micro-batch."""

    name: str
    metric: Any
    """A ClassifierMetric, or a torchmetrics Metric or MetricCollection of a user's."""
    arguments: Arguments


def measures(spec: DataSpec, own: Mapping[str, Any]) -> dict[str, Measure]:
    """Accuracy, macro F1 and confusion matrix where the data has classes, then a user's own, which may replace or
    (with None) leave out one of these. Raises ModelError for what is no metric."""
    classes = len(spec.labels)
    made = {
        name: Measure(name=name, metric=metric, arguments=_of_classes(classes))
        for name, metric in classifier_metrics(classes).items()
    }
    for name, declared in own.items():
        made.pop(name, None)
        if declared is not None:
            made[name] = _own(name, declared)
    return made


def classified(outputs: Outputs, batch: Batch, classes: int) -> tuple[Tensor, Tensor] | None:
    """Logits [m, classes, ...] among the outputs and the integer labels [m, ...] that they are for; None where outputs
    or labels are something else."""
    logits, label = logits_of(outputs), batch.get(LABEL)
    if logits is None or label is None or label.is_floating_point() or logits.ndim < 2:
        return None
    is_fitting = logits.shape[1] == classes and (len(logits), *logits.shape[2:]) == tuple(label.shape)
    return (logits, label) if is_fitting else None


def _of_classes(classes: int) -> Arguments:
    return lambda outputs, batch: classified(outputs, batch, classes)


def _own(name: str, declared: Any) -> Measure:
    from torchmetrics import Metric, MetricCollection

    is_pair = isinstance(declared, tuple | list) and len(declared) == 2
    metric, adapter = declared if is_pair else (declared, None)
    if not isinstance(metric, Metric | MetricCollection) or not (adapter is None or callable(adapter)):
        raise ModelError(
            f"metrics(spec) gives {_told(declared)} for {name!r}: a metric is a torchmetrics.Metric, or a pair of one "
            "and a function (outputs, batch) -> the arguments of its update(); None leaves out accuracy, f1 or "
            "confusion"
        )
    return Measure(name=name, metric=metric, arguments=_adapted(name, adapter) if adapter else _labelled(name))


def _told(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def _labelled(name: str) -> Arguments:
    def arguments(outputs: Outputs, batch: Batch) -> Any:
        if LABEL not in batch:
            raise ModelError(
                f"the metric {name!r} cannot be shown anything: without a function of its own a metric is updated with "
                f"the outputs and the column {LABEL!r}, and the data has no such column (there is: "
                f"{', '.join(sorted(batch))}); {EXAMPLE}"
            )
        return outputs, batch[LABEL]

    return arguments


def _adapted(name: str, adapter: Arguments) -> Arguments:
    def arguments(outputs: Outputs, batch: Batch) -> Any:
        found = adapter(outputs, batch)
        if not isinstance(found, tuple | list | dict | None):
            raise ModelError(
                f"the function of the metric {name!r} gives {_told(found)}: it gives a tuple of the arguments of the "
                "metric's update(), a dict of them by name, or None where this batch does not count"
            )
        return found

    return arguments
