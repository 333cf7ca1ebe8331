"""How good the model is: every sample of a split exactly once, on any number of processes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
from lockstep.core.numerics.seeds import seed_all, seed_of
from lockstep.training.metrics.classifier_metrics import CONFUSION
from lockstep.training.metrics.declared_metrics import Measure, classified
from lockstep.training.metrics.metric_tally import Part, Tally, numbers, tally
from lockstep.training.metrics.requested_metrics import Asked, is_asked

T = TypeVar("T")
MOST_CLASSES = 100
"""A confusion matrix of more classes is not written down."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: the model of a run, or an export."""

    forward: Forward
    """Every rank calls it equally often."""
    loss: Callable[[Outputs, Batch], LossSum]
    measures: dict[str, Measure]
    asked: Asked = "auto"
    """Of the sums that come with the loss, those that are reported."""
    device: torch.device
    """Where outputs are."""
    is_whole: bool = True
    """Whether a rank's forward pass takes no other rank, so that an error in it can be shared."""


class Predictions:
    """What was predicted of each of N samples, into C classes; filled in on the main process."""

    def __init__(self, samples: int, classes: int) -> None:
        self.logits = torch.zeros(samples, classes)
        """float32 [N, C]."""
        self.labels = torch.zeros(samples, dtype=torch.int64)

    def rows(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Logits and labels of a micro-batch; None where outputs are not one row of logits for each one label."""
        found = classified(outputs, batch, self.logits.shape[1])
        if found is None or found[1].ndim != 1:
            return None
        return found[0].float().cpu(), found[1].cpu()

    def take(self, indices: tuple[int, ...], rows: tuple[Tensor, Tensor]) -> None:
        self.logits[list(indices)], self.labels[list(indices)] = rows


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result over a whole split."""

    samples: int
    values: dict[str, float]
    """Loss and further sums (means over what the loss counts: samples, or tokens) and metrics by name."""
    confusion: list[list[int]] | None
    """Counts [classes][classes]: row = true label, column = predicted."""
    predictions: Predictions | None = None
    """On the main process, where they were asked for, and the model is a classifier."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    number: int
    indices: tuple[int, ...]
    total: float
    count: float
    sums: dict[str, float]
    terms: dict[str, tuple[float, float]]
    """Total and count of each term of the loss."""
    parts: dict[str, Part]
    """Of each metric."""
    rows: tuple[Tensor, Tensor] | None


@dataclass(kw_only=True)
class Whole:
    """A split's result in the making: micro-batches are taken in the order of their numbers."""

    subject: Subject
    predictions: Predictions | None = None
    tallies: dict[str, Tally] = field(init=False)
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    sums: list[dict[str, float]] = field(default_factory=list)
    terms: list[dict[str, tuple[float, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.subject.device
        self.tallies = {name: tally(measure, device) for name, measure in self.subject.measures.items()}

    def measured(self, micro_batch: MicroBatch, outputs: Outputs) -> Measured:
        """What a micro-batch adds, without a copy of anything on the device."""
        batch = micro_batch.batch
        with torch.no_grad():
            loss = self.subject.loss(outputs, batch)
            parts = {name: each.part(outputs, batch) for name, each in self.tallies.items()}
        return Measured(
            number=micro_batch.shard,
            indices=micro_batch.indices,
            total=float(loss.total),
            count=float(loss.count),
            sums={name: float(value) for name, value in loss.sums.items()},
            terms={name: (float(term.total), float(term.count)) for name, term in loss.terms.items()},
            parts=parts,
            rows=self.predictions.rows(outputs, batch) if self.predictions is not None else None,
        )

    def take(self, measured: Measured) -> None:
        self.losses.append((measured.total, measured.count, len(measured.indices)))
        self.sums.append(measured.sums)
        self.terms.append(measured.terms)
        for name, part in measured.parts.items():
            self.tallies[name].join(measured.number, part)
        if self.predictions is not None and measured.rows is not None:
            self.predictions.take(measured.indices, measured.rows)
        elif self.predictions is not None:
            self.predictions = None

    def take_all(self, found: Iterable[Measured]) -> None:
        """Join what several add, in their order."""
        for measured in found:
            self.take(measured)

    def losses_and_sums(self) -> tuple[int, dict[str, float]]:
        """(samples, name -> mean over what the loss, or one of its terms, counts)."""
        total, count, samples = torch.tensor(self.losses, dtype=torch.float64).sum(0).tolist()
        names = sorted({name for row in self.sums for name in row if is_asked(name, self.subject.asked)})
        table = torch.tensor([[row.get(name, 0.0) for name in names] for row in self.sums], dtype=torch.float64)
        wholes = zip([*names, "loss"], [*table.sum(0).tolist(), total], strict=True)
        means = {name: value / count if count else float("nan") for name, value in wholes}
        terms = self.means_of_terms()
        means["loss"] += sum(terms.values())
        return int(samples), {**{n: value for n, value in terms.items() if is_asked(n, self.subject.asked)}, **means}

    def means_of_terms(self) -> dict[str, float]:
        """Name -> mean over what the term counts; 0 where that is nothing."""
        names = sorted({name for row in self.terms for name in row})
        sums = {
            name: torch.tensor([row.get(name, (0.0, 0.0)) for row in self.terms], dtype=torch.float64).sum(0).tolist()
            for name in names
        }
        return {name: total / count if count else 0.0 for name, (total, count) in sums.items()}

    def result(self) -> Evaluation:
        samples, means = self.losses_and_sums()
        computed = {name: each.value() for name, each in self.tallies.items() if each.updates}
        confusion = computed.pop(CONFUSION, None)
        metrics = {k: v for name, value in computed.items() for k, v in numbers(name, value).items()}
        return Evaluation(
            samples=samples,
            values={"loss": means.pop("loss"), **{k: v for k, v in means.items() if k not in metrics}, **metrics},
            confusion=confusion.tolist() if confusion is not None and len(confusion) <= MOST_CLASSES else None,
            predictions=self.predictions,
        )


def evaluate(
    subject: Subject,
    batches: Iterable[MicroBatch],
    *,
    total: int,
    predictions: Predictions | None = None,
) -> Evaluation:
    """Measure a model as it is now; `batches` are this rank's of the split's `total` micro-batches, of which rank r
    runs those with the numbers r, r + W, r + 2 W, ... What is predicted is kept where there is somewhere to keep it.

    Every process measures its micro-batches, the main one joins them in the order of their numbers: the same bits for
    every world. Every rank returns the same, but for the predictions. Raises EvaluationFailed, on all ranks, where a
    user's loss, metric or data raises, also if it does so on one of them only.
    """
    whole = Whole(subject=subject, predictions=predictions)
    arriving = iter(batches)
    for _ in range(-(-total // dist.get_world_size())):
        _round(arriving, whole)
    result, error = _attempt(whole.result) if dist.get_rank() == 0 else (None, None)
    _raise_everywhere(error)
    plain = broadcast_object((result.samples, result.values, result.confusion) if result else None)
    assert plain is not None
    samples, values, confusion = plain
    kept = result.predictions if result else None
    return Evaluation(samples=samples, values=values, confusion=confusion, predictions=kept)


def _round(arriving: Iterator[MicroBatch], whole: Whole) -> None:
    subject = whole.subject

    def rest(micro_batch: MicroBatch, outputs: Outputs) -> Measured | None:
        progress()
        return None if micro_batch.ghost else whole.measured(micro_batch, outputs)

    def all_of_it() -> Measured | None:
        micro_batch = next(arriving)
        return rest(micro_batch, _outputs(subject, micro_batch))

    if subject.is_whole:
        part, error = _attempt(all_of_it)
    else:  # no rank may stay away from a forward pass that others have begun
        with raise_on_all_ranks(), _told():
            micro_batch = next(arriving)
        outputs = _outputs(subject, micro_batch)
        part, error = _attempt(lambda: rest(micro_batch, outputs))
    everyone = gather_object((part, error))
    if everyone is not None:
        error = next((error for _, error in everyone if error is not None), None)
        found = [part for part, _ in everyone if part is not None]
        if error is None:
            _, error = _attempt(partial(whole.take_all, found))
    _raise_everywhere(error)


def _outputs(subject: Subject, micro_batch: MicroBatch) -> Outputs:
    seed_all(seed_of("evaluation", micro_batch.shard))  # a model may draw numbers in evaluation, too
    return subject.forward(micro_batch.batch)


def trial_evaluation(subject: Subject, micro_batch: MicroBatch) -> tuple[list[str], bool]:
    """Measure one micro-batch, the same on every rank, before any time has been spent on training -> the names of what
    is measured, and whether they are all; else names of metrics that cannot be computed of so few samples are names of
    their declarations. Every rank has to call it. Raises EvaluationFailed and other errors, on all ranks."""
    whole = Whole(subject=subject)
    outputs: Any = None
    if not subject.is_whole:
        outputs = _outputs(subject, micro_batch)
    with raise_on_all_ranks(), _told("an evaluation was tried with the first samples before training, and failed"):
        if subject.is_whole:
            outputs = _outputs(subject, micro_batch)
        whole.take(whole.measured(micro_batch, outputs))
        return _names(whole)


def _names(whole: Whole) -> tuple[list[str], bool]:
    names, is_certain = set(whole.losses_and_sums()[1]), True
    for name, each in whole.tallies.items():
        value, error = _attempt(each.value)
        names |= {name} if error else set(numbers(name, value)) if each.updates and name != CONFUSION else set()
        is_certain = is_certain and error is None and each.updates > 0
    return sorted(names), is_certain


def _attempt(task: Callable[[], T]) -> tuple[T | None, LockstepError | None]:
    """What it returns, or the error that it raises."""
    try:
        with _told():
            return task(), None
    except LockstepError as error:
        return None, error


@contextmanager
def _told(what: str = "the evaluation failed") -> Iterator[None]:
    """Whatever a user's code raises becomes an EvaluationFailed with the frames of that code."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        if is_lost_peer(error):
            raise
        raise EvaluationFailed(f"{what}:\n{user_code.format_traceback(error)}") from None


def _raise_everywhere(error: LockstepError | None) -> None:
    """Raise what the main process says went wrong, on every rank."""
    error = broadcast_object(error) if dist.get_world_size() > 1 else error
    if error is not None:
        error.is_shared = True
        raise error
