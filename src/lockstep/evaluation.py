"""How good the model is: every sample of a split exactly once, on any number of processes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.contracts import Batch, DataSpec, Forward, LossSum, MicroBatch
from lockstep.runtime.collectives import add_disjoint
from lockstep.runtime.whereabouts import progress

CONFUSION = "confusion"
METRICS = ["accuracy", "f1", "loss"]
"""What is always measured of a classifier; a user's file may add others."""
MOST_CLASSES = 100
"""A confusion matrix of more classes is not written down."""
CHUNK = 1024
"""Samples that a metric is shown at once where it sees all predictions in their own order."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: the model of a run, or an export."""

    forward: Forward
    """Every rank calls it equally often."""
    loss: Callable[[Tensor, Batch], LossSum]
    metrics: dict[str, Any]
    """torchmetrics by name."""
    device: torch.device
    """Where outputs are."""


class Predictions:
    """What was predicted of each of N samples, into C classes. A rank fills in those it runs; `complete` adds the
    others'."""

    def __init__(self, samples: int, classes: int) -> None:
        self.logits = torch.zeros(samples, classes)
        """float32 [N, C]."""
        self.labels = torch.zeros(samples, dtype=torch.int64)

    def fit(self, outputs: Tensor, batch: Batch) -> bool:
        """Whether a model's outputs are one row of logits for each sample's one label."""
        label = batch.get("label")
        return label is not None and label.ndim == 1 and outputs.shape == (len(label), self.logits.shape[1])

    def take(self, micro_batch: MicroBatch, outputs: Tensor) -> None:
        """Keep those of a micro-batch."""
        rows = list(micro_batch.indices)
        self.logits[rows] = outputs.float().cpu()
        self.labels[rows] = micro_batch.batch["label"].cpu()

    def complete(self) -> None:
        """On every rank those of all."""
        if dist.get_world_size() > 1:
            add_disjoint(self.logits)
            add_disjoint(self.labels)

    def show(self, collection: Any) -> None:
        """Update metrics with all of them, in the order of the samples, whoever ran which: floats that a metric adds up
        have the same bits on any number of ranks, as they would not if each added its own."""
        collection.to("cpu")
        for metric in collection.values():
            metric.distributed_available_fn = _nobody_else
        for logits, labels in zip(self.logits.split(CHUNK), self.labels.split(CHUNK), strict=True):
            collection.update(logits, labels)


def _nobody_else() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result over a whole split."""

    samples: int
    values: dict[str, float]
    """Loss (mean over what it counts: samples, or tokens) and metrics by name."""
    confusion: list[list[int]] | None
    """Counts [classes][classes]: row = true label, column = predicted."""
    predictions: Predictions | None = None
    """Where they were asked for, and the model is a classifier."""


def metrics_for(spec: DataSpec, own: dict[str, Any]) -> dict[str, Any]:
    """torchmetrics by name: accuracy, macro F1 and confusion matrix where there are labels, and the user's own."""
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

    classes = len(spec.labels)
    made: dict[str, Any] = {}
    if classes > 1:
        made["accuracy"] = MulticlassAccuracy(classes, average="micro", validate_args=False)
        made["f1"] = MulticlassF1Score(classes, average="macro", validate_args=False)
        made[CONFUSION] = MulticlassConfusionMatrix(classes, validate_args=False)
    return {**made, **own}


def evaluate(
    subject: Subject,
    batches: Iterable[MicroBatch],
    *,
    total: int,
    predictions: Predictions | None = None,
) -> Evaluation:
    """Measure a model as it is now; `batches` are this rank's of the split's `total` micro-batches. What is predicted
    is kept where there is somewhere to keep it, which takes another collective over all of it.

    The same numbers on every rank and for every world: counts are integers, losses are added in one fixed order.
    """
    from torchmetrics import MetricCollection

    collection = MetricCollection(subject.metrics).to(subject.device)
    collection.reset()
    table = torch.zeros(total, 3, dtype=torch.float64, device=subject.device)
    for place, micro_batch in enumerate(batches):
        outputs = subject.forward(micro_batch.batch)
        progress()
        if place == 0 and predictions is not None and not predictions.fit(outputs, micro_batch.batch):
            predictions = None  # on every rank, as each runs at least one micro-batch, and all the same model
        if micro_batch.ghost:
            continue
        with torch.no_grad():
            loss = subject.loss(outputs, micro_batch.batch)
        row = table[micro_batch.shard]
        row[0], row[1], row[2] = loss.total, loss.count, len(micro_batch.indices)
        _keep(micro_batch, outputs, predictions or collection)
    if dist.get_world_size() > 1:
        add_disjoint(table)
    if predictions is not None:
        predictions.complete()
        predictions.show(collection)
    return _evaluation(table, collection, predictions)


def _keep(micro_batch: MicroBatch, outputs: Tensor, target: Any) -> None:
    if isinstance(target, Predictions):
        target.take(micro_batch, outputs)
    elif "label" in micro_batch.batch:
        target.update(outputs, micro_batch.batch["label"])


def _evaluation(table: Tensor, collection: Any, predictions: Predictions | None) -> Evaluation:
    results = {name: metric.compute() for name, metric in collection.items(keep_base=True)}
    confusion = results.pop(CONFUSION, None)
    loss_sum, count, samples = table.sum(0).tolist()
    return Evaluation(
        samples=int(samples),
        values={"loss": loss_sum / count, **{name: float(value) for name, value in results.items()}},
        confusion=confusion.tolist() if confusion is not None and len(confusion) <= MOST_CLASSES else None,
        predictions=predictions,
    )
