"""Accumulate a metric over a split in the order of the micro-batches, whichever process ran them.

Each process computes a *contribution* from every micro-batch that it runs; the main process merges all contributions in
order, so floats are added in the same order for any world size. A contribution is the metric's state after this
micro-batch alone if the metric's class declares its states mergeable (`full_state_update = False`, and reductions by
sum, min, max or cat). For any other metric it is the arguments of update(), which the main process calls.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Outputs
from lockstep.core.modules.outputs import moved
from lockstep.core.numerics.seeds import seed_all, seed_of
from lockstep.models.metrics.declared_metrics import DeclaredMetric, SummedMetric

Contribution = Any
"""Contribution of a micro-batch to a metric; None if the metric's arguments are None for it."""


class Tally:
    """A metric while it is measured; one of any kind: the main process updates it with every micro-batch."""

    def __init__(self, declared: DeclaredMetric, device: torch.device) -> None:
        self.declared, self.metric, self.device = declared, declared.metric, device
        self.updates = 0
        """Micro-batches with a contribution, so far."""

    def contribution(self, outputs: Outputs, batch: Batch) -> Contribution:
        arguments = self.declared.arguments(outputs, batch)
        return None if arguments is None else self._contribution(arguments)

    def read(self, contribution: Contribution) -> Contribution:
        """Copy a contribution to the CPU; waits for the device."""
        return contribution

    def merge(self, number: int, contribution: Contribution) -> None:
        """Add the contribution of micro-batch `number`."""
        if contribution is not None:
            self._merge(number, contribution)
            self.updates += 1

    def value(self) -> Any:
        """Compute the metric; None before the first contribution."""
        return self._value() if self.updates else None

    def _contribution(self, arguments: Any) -> Contribution:
        return moved(arguments, "cpu")

    def _merge(self, number: int, contribution: Contribution) -> None:
        seed_all(seed_of("metric", number))  # some metrics draw random numbers, such as BootStrapper
        self._update(contribution)

    def _value(self) -> Any:
        seed_all(seed_of("metric", -1))
        return self.metric.compute()

    def _update(self, arguments: Any) -> None:
        arguments = moved(arguments, self.device)
        if isinstance(arguments, Mapping):
            self.metric.update(**arguments)
        else:
            self.metric.update(*arguments)


class SumTally(Tally):
    """An objective's metric, from summed statistics."""

    sum: Tensor | float = 0.0

    def _contribution(self, arguments: Any) -> Contribution:
        return arguments

    def read(self, contribution: Contribution) -> Contribution:
        return None if contribution is None else self.metric.statistics(*moved(contribution, "cpu"))

    def _merge(self, number: int, contribution: Contribution) -> None:
        self.sum = self.sum + contribution if self.updates else contribution

    def _value(self) -> Any:
        return self.metric.compute(self.sum)


class MergedTally(Tally):
    """A metric with mergeable states: each process updates it with its own micro-batches, one at a time. Not by
    Metric.merge_state, which copies list states at every call and puts the newer rows first."""

    def __init__(self, declared: DeclaredMetric, device: torch.device) -> None:
        super().__init__(declared, device)
        self.states: dict[str, Any] = {}

    def _contribution(self, arguments: Any) -> Contribution:
        self.metric.reset()
        self._update(arguments)
        return moved(dict(self.metric.metric_state), "cpu")

    def _merge(self, number: int, contribution: Contribution) -> None:
        for name, state in contribution.items():
            merge = _state_merge(self.metric, name)
            assert merge is not None
            self.states[name] = merge(self.states[name], state) if self.updates else state

    def _value(self) -> Any:
        self.metric.reset()
        for name, state in moved(self.states, self.device).items():
            setattr(self.metric, name, state)
        self.metric._update_count, self.metric._computed = self.updates, None
        return self.metric.compute()


def tally(declared: DeclaredMetric, device: torch.device) -> Tally:
    if isinstance(declared.metric, SummedMetric):
        return SumTally(declared, device)
    declared.metric.to(device)
    for metric in _all_metrics(declared.metric):
        metric.distributed_available_fn = lambda: False  # states must not be synchronised by torchmetrics, too
    declared.metric.reset()
    return (MergedTally if _is_mergeable(declared.metric) else Tally)(declared, device)


def _cat(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        one.extend(other)
        return one
    return torch.cat([torch.atleast_1d(one), torch.atleast_1d(other)])


def _state_merge(metric: Any, state: str) -> Callable[[Any, Any], Any] | None:
    """Return the function that merges two values of a state; None if its reduction is of another kind."""
    from torchmetrics.utilities import data

    reduction = metric._reductions[state]
    if reduction is data.dim_zero_cat:
        return _cat
    merges: dict[Any, Callable[[Any, Any], Any]] = {
        data.dim_zero_sum: torch.add,
        data.dim_zero_min: torch.minimum,
        data.dim_zero_max: torch.maximum,
    }
    return merges.get(reduction) if isinstance(metric._defaults[state], Tensor) else None


def _is_mergeable(metric: Any) -> bool:
    from torchmetrics import Metric

    is_single = isinstance(metric, Metric) and sum(1 for _ in _all_metrics(metric)) == 1
    if not is_single or metric.full_state_update is not False or not metric._defaults:
        return False
    return all(_state_merge(metric, name) is not None for name in metric._defaults)


def _all_metrics(metric: Any) -> Iterator[Any]:
    """Yield the metric and those inside it, also in lists and dicts, where Module.modules() does not look."""
    from torchmetrics import Metric

    seen: set[int] = set()
    pending = [metric]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Metric):
            yield value
        if isinstance(value, torch.nn.Module):
            pending += vars(value).values()  # submodules are in its dict `_modules`
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()


def numbers(name: str, value: Any) -> dict[str, float]:
    """Flatten a metric's value: {NAME: number}, NAME.KEY for each entry of a dict, NAME.0, NAME.1, ... for a tensor or
    list. Raises ModelError for anything else."""
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in numbers(f"{name}.{key}", item).items()}
    if isinstance(value, list | tuple):
        return numbers(name, dict(enumerate(value)))
    if isinstance(value, Tensor) and value.numel() != 1:
        return numbers(name, value.tolist())
    try:
        return {name: float(value)}
    except (TypeError, ValueError):
        raise ModelError(
            f"the metric {name!r} computes a {type(value).__name__}: it computes a number, a tensor, or a dict of them"
        ) from None
