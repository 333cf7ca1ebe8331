"""Evaluate a model on every sample of a split exactly once; any number of processes gives the same result."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base import user_code
from lockstep.base.errors import EvaluationFailed, LockstepError
from lockstep.base.model_contracts import Batch, Forward, LossSum, MicroBatch, Outputs
from lockstep.core.distributed.collectives import broadcast_object, gather_object, raise_on_all_ranks
from lockstep.core.distributed.process_group import is_lost_peer
from lockstep.core.host.activity import progress
from lockstep.core.numerics.loss import shown
from lockstep.core.numerics.seeds import seed_all, seed_of
from lockstep.models.metrics.declared_metrics import CONFUSION, DeclaredMetric, Requested, is_requested
from lockstep.models.metrics.metric_tally import Contribution, numbers, tally

T = TypeVar("T")
Rows = Callable[[Outputs, Batch], tuple[Any, Any] | None]
"""Objective.rows."""
MAX_CONFUSION_CLASSES = 100
TOGETHER = 8
"""Micro-batches that each rank runs before it reads their results from the device and the main process gathers them."""


@dataclass(frozen=True, kw_only=True)
class EvaluationTarget:
    """Target of an evaluation: the model of a run, or an export."""

    forward: Forward
    """Called equally often on every rank."""
    loss: Callable[[Outputs, Batch], LossSum]
    metrics: dict[str, DeclaredMetric]
    derived: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda _: {}
    """Model.derived."""
    requested: Requested = "auto"
    """Names of the LossSum.sums and derived values to report."""
    device: torch.device
    is_local: bool = True
    """Whether a forward pass involves no other rank: a rank may fail in it and still join the next collective."""
    notice: Callable[[int, int], None] = lambda _done, _total: None
    """Called with the number of micro-batches measured, and of all."""


class Predictions:
    """Outputs and targets of N samples, filled in on the main process."""

    def __init__(self, samples: int, rows: Rows) -> None:
        self.samples, self.rows = samples, rows
        self.outputs: Any = None
        """float32 [N, K], or a list of N tensors [W, K]."""
        self.targets: Any = None
        """[N], [N, K], or a list of N tensors [W]."""

    def add(self, indices: tuple[int, ...], rows: tuple[Any, Any]) -> None:
        outputs, targets = rows
        if self.outputs is None:
            self.outputs, self.targets = _blank(outputs, self.samples), _blank(targets, self.samples)
        _fill(self.outputs, indices, outputs)
        _fill(self.targets, indices, targets)

    def part(self, kept: Any) -> "Predictions":
        """Return the predictions of some samples, by their indices."""
        found = Predictions(len(kept), self.rows)
        found.outputs, found.targets = (
            each[kept] if isinstance(each, Tensor) else [each[index] for index in kept]
            for each in (self.outputs, self.targets)
        )
        return found


def _blank(rows: Any, samples: int) -> Any:
    """Return a tensor, or a list, that can hold such rows of all samples."""
    return rows.new_zeros(samples, *rows.shape[1:]) if isinstance(rows, Tensor) else [None] * samples


def _fill(whole: Any, indices: tuple[int, ...], rows: Any) -> None:
    if isinstance(whole, Tensor):
        whole[list(indices)] = rows
    else:
        for index, row in zip(indices, rows, strict=True):
            whole[index] = row


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    samples: int
    values: dict[str, float]
    """Name -> value: the loss and LossSum.sums as means over what the loss counts (samples or tokens), and metrics."""
    confusion: list[list[int]] | None
    """Counts [classes][classes]: row = true label, column = predicted."""
    predictions: Predictions | None = None
    """Predictions on the main process, if requested and each sample has outputs and a target."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchResult:
    """Result of a micro-batch, on the device until it is read."""

    number: int
    indices: tuple[int, ...]
    total: Tensor | float
    count: Tensor | float
    sums: dict[str, Tensor | float]
    terms: dict[str, tuple[Tensor | float, Tensor | float]]
    """(total, count) of each term of the loss."""
    contributions: dict[str, Contribution]
    rows: tuple[Any, Any] | None
    """Outputs and targets of its samples, as Objective.rows gives them."""


class SplitTotals:
    """Running totals over a split, to which micro-batches are added in the order of their numbers."""

    def __init__(self, target: EvaluationTarget, predictions: Predictions | None = None) -> None:
        self.target, self.predictions = target, predictions
        self.tallies = {name: tally(metric, target.device) for name, metric in target.metrics.items()}
        self.losses: list[Any] = []
        self.sums: list[Any] = []
        self.terms: list[Any] = []

    def measure(self, micro_batch: MicroBatch, outputs: Outputs) -> MicroBatchResult:
        """Compute loss and metrics of one micro-batch, without waiting for the device."""
        batch = micro_batch.batch
        with torch.no_grad():
            loss = self.target.loss(outputs, batch)
            contributions = {name: each.contribution(outputs, batch) for name, each in self.tallies.items()}
        return MicroBatchResult(
            number=micro_batch.shard,
            indices=micro_batch.indices,
            total=loss.total,
            count=loss.count,
            sums=dict(loss.sums),
            terms={name: (term.total, term.count) for name, term in loss.terms.items()},
            contributions=contributions,
            rows=self.predictions.rows(outputs, batch) if self.predictions else None,
        )

    def read(self, result: MicroBatchResult) -> MicroBatchResult:
        """Copy a result to the CPU; waits for the device."""
        return replace(
            result,
            total=float(result.total),
            count=float(result.count),
            sums={name: float(value) for name, value in result.sums.items()},
            terms={name: (float(total), float(count)) for name, (total, count) in result.terms.items()},
            contributions={name: self.tallies[name].read(each) for name, each in result.contributions.items()},
        )

    def add(self, result: MicroBatchResult) -> None:
        self.losses.append((result.total, result.count, len(result.indices)))
        self.sums.append(result.sums)
        self.terms.append(result.terms)
        for name, contribution in result.contributions.items():
            self.tallies[name].merge(result.number, contribution)
        if self.predictions is None or result.rows is None:
            self.predictions = None
        else:
            self.predictions.add(result.indices, result.rows)

    def add_all(self, results: Iterable[MicroBatchResult]) -> None:
        for result in sorted(results, key=lambda result: result.number):
            self.add(result)

    def means(self) -> tuple[int, dict[str, float]]:
        """Return the number of samples, and name -> mean of the loss and what is reported with it."""
        total, count, samples = _column_sums(self.losses)
        names = sorted({name for row in self.sums for name in row})
        sums = _column_sums([[row.get(name, 0.0) for name in names] for row in self.sums])
        means = {
            name: value / count if count else float("nan")
            for name, value in zip([*names, "loss"], [*sums, total], strict=True)
        }
        terms = {}
        for name in sorted({name for row in self.terms for name in row}):
            term_total, term_count = _column_sums([row.get(name, (0.0, 0.0)) for row in self.terms])
            terms[name] = term_total / term_count if term_count else 0.0
        means["loss"] += sum(terms.values())
        every = shown({**terms, **means, **(self.target.derived(means) if count else {})})
        return int(samples), {n: v for n, v in every.items() if n == "loss" or is_requested(n, self.target.requested)}

    def result(self) -> Evaluation:
        samples, means = self.means()
        computed = {name: each.value() for name, each in self.tallies.items() if each.updates}
        confusion = computed.pop(CONFUSION, None)
        metrics = {k: v for name, value in computed.items() for k, v in numbers(name, value).items()}
        return Evaluation(
            samples=samples,
            values={"loss": means.pop("loss"), **{k: v for k, v in means.items() if k not in metrics}, **metrics},
            confusion=confusion.tolist() if confusion is not None and len(confusion) <= MAX_CONFUSION_CLASSES else None,
            predictions=self.predictions,
        )


def _column_sums(rows: list[Any]) -> list[float]:
    return torch.tensor(rows, dtype=torch.float64).sum(0).tolist()


def evaluate(
    target: EvaluationTarget, batches: Iterable[MicroBatch], *, total: int, predictions: Predictions | None = None
) -> Evaluation:
    """Evaluate the model; `batches` are this rank's of the split's `total` micro-batches: numbers r, r + W, r + 2 W ...

    Each process measures its own micro-batches. The main process adds them up in the order of their numbers, so the
    bits do not depend on the world size, and broadcasts the result, except for the predictions. Raises
    EvaluationFailed on all ranks when the user's loss, metric or data raises on any rank.
    """
    totals = SplitTotals(target, predictions)
    arriving = iter(batches)
    together = TOGETHER * dist.get_world_size()
    for done in range(0, total, together):
        _evaluate_rounds(arriving, totals, -(-min(together, total - done) // dist.get_world_size()))
        target.notice(min(done + together, total), total)
    result, error = _attempt(totals.result) if dist.get_rank() == 0 else (None, None)
    _raise_on_all_ranks(error)
    shared = broadcast_object(replace(result, predictions=None) if result else None)
    assert shared is not None
    return result or shared


def _evaluate_rounds(arriving: Iterator[MicroBatch], totals: SplitTotals, count: int) -> None:
    """Measure the next `count` micro-batches of every rank; the main process adds the results to its totals."""
    own = list[MicroBatchResult]()
    errors = [_measure(arriving, totals, own) for _ in range(count)]
    read, error = _attempt(lambda: [*map(totals.read, own)])
    error = next(filter(None, [*errors, error]), None)
    gathered, error = _attempt(lambda: gather_object((read or [], error)))
    if gathered is not None:
        error = next((error for _, error in gathered if error is not None), None)
        if error is None:
            _, error = _attempt(lambda: totals.add_all(result for results, _ in gathered for result in results))
    _raise_on_all_ranks(error)


def _measure(arriving: Iterator[MicroBatch], totals: SplitTotals, own: list[MicroBatchResult]) -> LockstepError | None:
    """Measure this rank's next micro-batch, unless it is a ghost, and append the result; returns what went wrong."""

    def measure(micro_batch: MicroBatch, outputs: Outputs) -> None:
        progress()
        if not micro_batch.ghost:
            own.append(totals.measure(micro_batch, outputs))

    if totals.target.is_local:
        return _attempt(lambda: measure(micro_batch := next(arriving), _forward(totals.target, micro_batch)))[1]
    with raise_on_all_ranks(), _as_evaluation_failed():  # a rank must not miss a forward pass that others have entered
        micro_batch = next(arriving)
    outputs = _forward(totals.target, micro_batch)
    return _attempt(lambda: measure(micro_batch, outputs))[1]


def _forward(target: EvaluationTarget, micro_batch: MicroBatch) -> Outputs:
    seed_all(seed_of("evaluation", micro_batch.shard))  # a model may draw random numbers in evaluation mode, too
    return target.forward(micro_batch.batch)


def trial_evaluation(target: EvaluationTarget, micro_batch: MicroBatch) -> tuple[list[str], bool]:
    """Evaluate one micro-batch, the same on every rank, to find errors before training; a collective.

    Returns the names of what is measured, and whether the list is complete: a metric that cannot be computed from so
    few samples is listed by the name of its declaration. Raises EvaluationFailed and other errors on all ranks.
    """
    totals = SplitTotals(target)
    outputs: Any = None
    if not target.is_local:
        outputs = _forward(target, micro_batch)
    with (
        raise_on_all_ranks(),
        _as_evaluation_failed("an evaluation was tried with the first samples before training, and failed"),
    ):
        if target.is_local:
            outputs = _forward(target, micro_batch)
        totals.add(totals.read(totals.measure(micro_batch, outputs)))
        names, is_complete = set(totals.means()[1]), True
        for name, each in totals.tallies.items():
            value, error = _attempt(each.value)
            if error is not None:
                names.add(name)
            elif each.updates and name != CONFUSION:
                names |= numbers(name, value).keys()
            is_complete = is_complete and error is None and each.updates > 0
        return sorted(names), is_complete


def _attempt(task: Callable[[], T]) -> tuple[T | None, LockstepError | None]:
    try:
        with _as_evaluation_failed():
            return task(), None
    except LockstepError as error:
        return None, error


@contextmanager
def _as_evaluation_failed(what: str = "the evaluation failed") -> Iterator[None]:
    """Turn what a user's code raises into an EvaluationFailed that quotes its stack frames."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        if is_lost_peer(error):
            raise
        raise EvaluationFailed(f"{what}:\n{user_code.format_traceback(error)}") from None


def _raise_on_all_ranks(error: LockstepError | None) -> None:
    """Raise the main process's error on every rank."""
    error = broadcast_object(error) if dist.get_world_size() > 1 else error
    if error is not None:
        error.is_shared = True
        raise error
