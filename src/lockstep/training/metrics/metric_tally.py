"""A metric over a whole split, in the order of its micro-batches, whichever process ran them.

A process makes a *part* of each micro-batch that it runs; the main process joins all parts, in order. The part is what
the metric's states become when it sees this micro-batch alone, where the metric's class says that such states can be
joined (`full_state_update = False`, and sums, minima, maxima or concatenations); of any other metric it is what its
update() is called with, and the main process calls it. Floats are therefore added in one order on any world.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Outputs
from lockstep.core.modules.outputs import each, moved
from lockstep.core.numerics.seeds import seed_all, seed_of
from lockstep.training.metrics.classifier_metrics import ClassifierMetric
from lockstep.training.metrics.declared_metrics import Measure

Join = Callable[[Any, Any], Any]
Part = Any
"""Of a metric and a micro-batch; None where the metric was shown nothing of it."""


class Tally(Protocol):
    """A metric while it is measured."""

    updates: int
    """Micro-batches that it has been shown something of, so far."""

    def part(self, outputs: Outputs, batch: Batch) -> Part:
        """What a micro-batch adds."""

    def join(self, number: int, part: Part) -> None:
        """Take in micro-batch `number`'s."""

    def value(self) -> Any:
        """What the metric computes; None where it has seen nothing."""


class Counted:
    """A figure of a classifier: confusion matrices are added up."""

    def __init__(self, measure: Measure) -> None:
        self.measure, self.metric, self.updates = measure, measure.metric, 0
        self.confusion = torch.zeros(self.metric.classes, self.metric.classes, dtype=torch.int64)

    def part(self, outputs: Outputs, batch: Batch) -> Part:
        found = self.measure.arguments(outputs, batch)
        return None if found is None else self.metric.confusion(*found)

    def join(self, number: int, part: Part) -> None:
        if part is not None:
            self.confusion += part
            self.updates += 1

    def value(self) -> Any:
        """The figure; None where nothing was counted."""
        return self.metric.compute(self.confusion) if self.updates else None


class Replayed:
    """A metric of any kind: the main process shows it every micro-batch."""

    def __init__(self, measure: Measure, device: torch.device) -> None:
        self.measure, self.device, self.updates = measure, device, 0
        self.metric = measure.metric.to(device)
        for metric in _all_metrics(self.metric):
            metric.distributed_available_fn = _nobody_else  # a metric must not join states over processes by itself
        self.metric.reset()

    def part(self, outputs: Outputs, batch: Batch) -> Part:
        found = self.measure.arguments(outputs, batch)
        return None if found is None else _sendable(found)

    def join(self, number: int, part: Part) -> None:
        if part is None:
            return
        seed_all(seed_of("metric", number))  # some draw numbers, such as a bootstrap
        self._update(part)
        self.updates += 1

    def value(self) -> Any:
        """What the metric computes; None where it has seen nothing."""
        if not self.updates:
            return None
        seed_all(seed_of("metric", -1))
        return self.metric.compute()

    def _update(self, found: Any) -> None:
        found = moved(found, self.device)
        if isinstance(found, Mapping):
            self.metric.update(**found)
        else:
            self.metric.update(*found)


class Merged(Replayed):
    """A metric whose states can be joined: each process updates it with its own micro-batches, one at a time."""

    def __init__(self, measure: Measure, device: torch.device) -> None:
        super().__init__(measure, device)
        self.states: dict[str, Any] = {}

    def part(self, outputs: Outputs, batch: Batch) -> Part:
        """The states after this micro-batch alone, on the CPU."""
        found = self.measure.arguments(outputs, batch)
        if found is None:
            return None
        self.metric.reset()
        self._update(found)
        return _sendable(dict(self.metric.metric_state))

    def join(self, number: int, part: Part) -> None:
        if part is None:
            return
        for name, state in part.items():
            join = _join_of(self.metric, name)
            assert join is not None
            self.states[name] = join(self.states[name], state) if self.updates else state
        self.updates += 1

    def value(self) -> Any:
        """What the metric computes from all states; None where it has seen nothing."""
        if not self.updates:
            return None
        self.metric.reset()
        for name, state in moved(self.states, self.device).items():
            setattr(self.metric, name, state)
        self.metric._update_count, self.metric._computed = self.updates, None
        return self.metric.compute()


def _sendable(part: Part) -> Part:
    """On the CPU, each tensor without what else its memory holds."""
    return each(lambda t: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t, moved(part, "cpu"))


def _sum(one: Tensor, other: Tensor) -> Tensor:
    return one + other


def _cat(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        one.extend(other)
        return one
    return torch.cat([torch.atleast_1d(one), torch.atleast_1d(other)])


def _join_of(metric: Any, state: str) -> Join | None:
    """How two values of a state become one; None where the class does not say, or needs all of them at once."""
    from torchmetrics.utilities import data

    tensors: dict[Any, Callable[[Any, Any], Any]] = {
        data.dim_zero_sum: _sum,
        data.dim_zero_min: torch.minimum,
        data.dim_zero_max: torch.maximum,
    }
    reduction = metric._reductions[state]
    if reduction is data.dim_zero_cat:
        return _cat
    return tensors.get(reduction) if isinstance(metric._defaults[state], Tensor) else None


def _is_mergeable(metric: Any) -> bool:
    from torchmetrics import Metric

    is_lone = isinstance(metric, Metric) and sum(1 for _ in _all_metrics(metric)) == 1
    if not is_lone or metric.full_state_update is not False or not metric._defaults:
        return False
    return all(_join_of(metric, name) is not None for name in metric._defaults)


def _all_metrics(metric: Any) -> Iterator[Any]:
    """The metric and those that it holds, as modules or in lists and dicts of its own."""
    from torchmetrics import Metric

    seen: set[int] = set()
    waiting = [metric]
    while waiting:
        held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Metric):
            yield held
        if isinstance(held, torch.nn.Module):
            waiting += [*held.children(), *(v for v in vars(held).values() if isinstance(v, list | tuple | dict))]
        elif isinstance(held, list | tuple):
            waiting += [v for v in held if isinstance(v, torch.nn.Module | list | tuple | dict)]
        elif isinstance(held, dict):
            waiting += [v for v in held.values() if isinstance(v, torch.nn.Module | list | tuple | dict)]


def _nobody_else() -> bool:
    return False


def tally(measure: Measure, device: torch.device) -> Tally:
    if isinstance(measure.metric, ClassifierMetric):
        return Counted(measure)
    return Merged(measure, device) if _is_mergeable(measure.metric) else Replayed(measure, device)


def numbers(name: str, value: Any) -> dict[str, float]:
    """A metric's value as numbers by name: one for a number, NAME.KEY for each of a dict, NAME.0, NAME.1, ... for a
    tensor of several. Raises ModelError for anything else."""
    if isinstance(value, Mapping):
        return {k: v for key, held in value.items() for k, v in numbers(f"{name}.{key}", held).items()}
    if isinstance(value, list | tuple):
        return {k: v for place, held in enumerate(value) for k, v in numbers(f"{name}.{place}", held).items()}
    if isinstance(value, Tensor) and value.numel() != 1:
        return numbers(name, value.tolist())
    try:
        return {name: float(value)}
    except (TypeError, ValueError):
        raise ModelError(
            f"the metric {name!r} computes a {type(value).__name__}: it computes a number, a tensor, or a dict of them"
        ) from None
