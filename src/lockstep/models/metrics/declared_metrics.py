"""Metrics by name: those of the objective and those that a user's file declares, and which of them are reported."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from lockstep.base.errors import ConfigError, ModelError, nearest
from lockstep.base.model_contracts import Batch, Outputs

CONFUSION = "confusion"
LABEL = "label"
EXAMPLE = "return {NAME: (METRIC, lambda outputs, batch: (outputs, batch[COLUMN]))} from metrics(spec)"

Arguments = Callable[[Outputs, Batch], Any]
"""(outputs, batch) -> arguments of a metric's update(), as a tuple or a dict; None to skip this batch."""
Requested = Literal["auto"] | tuple[str, ...]
"""evaluate.metrics: the names to report besides the loss, or "auto" for all. "NAME.PART" requests all of NAME."""

Compute = Callable[[Tensor], Any]
"""A sum of statistics -> the metric: a number, or a dict of numbers."""


@dataclass(frozen=True)
class SummedMetric:
    """A function of a sum of statistics over all samples; importing torchmetrics would take a process two seconds."""

    statistics: Callable[..., Tensor]
    """(the metric's arguments, on the CPU) -> what a micro-batch adds, int64 or float64 of a constant shape."""
    compute: Compute


@dataclass(frozen=True, kw_only=True)
class DeclaredMetric:
    """A metric, and how its arguments follow from a micro-batch."""

    metric: Any
    """A SummedMetric, or a user's torchmetrics Metric or MetricCollection."""
    arguments: Arguments


def summed_metrics(
    statistics: Callable[..., Tensor], computed: Mapping[str, Compute], arguments: Arguments
) -> dict[str, DeclaredMetric]:
    """Return the metrics that are computed from the same statistics, by name."""
    return {
        name: DeclaredMetric(metric=SummedMetric(statistics, compute), arguments=arguments)
        for name, compute in computed.items()
    }


def declared_metrics(built_in: Mapping[str, DeclaredMetric], own: Mapping[str, Any]) -> dict[str, DeclaredMetric]:
    """Return the objective's metrics, then the user's `own`, which may replace one of these, or drop it with None.
    Raises ModelError for anything that is not a metric."""
    metrics = dict(built_in)
    if not isinstance(own, Mapping | nn.ModuleDict):  # as a MetricCollection is
        raise ModelError(f"metrics(spec) gives {_described(own)}: return a dict of metrics, by their names")
    for name, declared in own.items():
        metrics.pop(name, None)
        if declared is not None:
            metrics[name] = _user_metric(name, declared)
    return metrics


def _user_metric(name: str, declared: Any) -> DeclaredMetric:
    from torchmetrics import Metric, MetricCollection

    is_pair = isinstance(declared, tuple | list) and len(declared) == 2
    metric, adapter = declared if is_pair else (declared, None)
    if not isinstance(metric, Metric | MetricCollection) or not (adapter is None or callable(adapter)):
        raise ModelError(
            f"metrics(spec) gives {_described(declared)} for {name!r}: a metric is a torchmetrics.Metric, or a pair of "
            "one and a function (outputs, batch) -> the arguments of its update(); None leaves out a built-in one"
        )
    return DeclaredMetric(metric=metric, arguments=partial(_arguments, name=name, adapter=adapter))


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def _arguments(outputs: Outputs, batch: Batch, *, name: str, adapter: Arguments | None) -> Any:
    """Return the arguments of a user's metric, by default outputs and labels. Raises ModelError."""
    if adapter is None and LABEL not in batch:
        raise ModelError(
            f"the metric {name!r} cannot be shown anything: without a function of its own a metric is updated with "
            f"the outputs and the column {LABEL!r}, and the data has no such column (there is: "
            f"{', '.join(sorted(batch))}); {EXAMPLE}"
        )
    arguments = adapter(outputs, batch) if adapter else (outputs, batch[LABEL])
    if not isinstance(arguments, tuple | list | dict | None):
        raise ModelError(
            f"the function of the metric {name!r} gives {_described(arguments)}: it gives a tuple of the arguments "
            "of the metric's update(), a dict of them by name, or None where this batch does not count"
        )
    return arguments


def mode_of(name: str, metrics: Mapping[str, DeclaredMetric]) -> Literal["min", "max"] | None:
    """Return whether smaller or larger values of a metric, NAME or NAME.PART, are better; None if it does not say."""
    parent, _, part = name.partition(".")
    metric: Any = metrics[parent].metric if parent in metrics else None
    if part and hasattr(metric, "items"):  # of a collection
        metric = dict(metric.items()).get(part)
    higher = getattr(metric, "higher_is_better", None)
    return None if higher is None else "max" if higher else "min"


def is_requested(name: str, requested: Requested) -> bool:
    """Return whether a metric, or one of LossSum.sums, is reported; accuracy and f1 imply the confusion matrix."""
    if requested == "auto":
        return True
    names = {each.partition(".")[0] for each in requested}
    return name in names or (name == CONFUSION and not names.isdisjoint(("accuracy", "f1")))


def check(setting: str, name: str | None, known: Sequence[str], *, are_all: bool) -> None:
    """Raise ConfigError if a setting names a metric that is not measured. With `are_all` false, some metrics could not
    be computed yet: their parts are unknown, and NAME.PART passes for a known NAME."""
    parents = {each.partition(".")[0] for each in known}
    if name is None or name in known or (setting == "evaluate.metrics" and name in {*parents, CONFUSION}):
        return
    if are_all or name.partition(".")[0] not in parents:
        raise ConfigError(
            f"{setting}: there is no metric {name!r}{nearest(name, list(known))} (there is: {', '.join(known)})"
        )
