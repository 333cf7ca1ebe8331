"""How good the model is: every sample of a split exactly once, on any number of processes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.contracts import DataSpec, MicroBatch, Model, Strategy
from lockstep.runtime.collectives import add_disjoint
from lockstep.runtime.whereabouts import progress

CONFUSION = "confusion"
METRICS = ["accuracy", "f1", "loss"]
"""What is always measured of a classifier; a user's file may add others."""
MOST_CLASSES = 100
"""A confusion matrix of more classes is not written down."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result over a whole split."""

    samples: int
    values: dict[str, float]
    """Loss (mean over what it counts: samples, or tokens) and metrics by name."""
    confusion: list[list[int]] | None
    """Counts [classes][classes]: row = true label, column = predicted."""


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
    strategy: Strategy,
    model: Model,
    batches: Iterable[MicroBatch],
    *,
    total: int,
    metrics: dict[str, Any],
) -> Evaluation:
    """Measure the model as it is now; `batches` are this rank's of the split's `total` micro-batches.

    The same numbers on every rank and for every world: counts are integers, losses are added in one fixed order.
    """
    from torchmetrics import MetricCollection

    device = next(model.parameters()).device
    collection = MetricCollection(metrics).to(device)
    collection.reset()
    table = torch.zeros(total, 3, dtype=torch.float64, device=device)
    for micro_batch in batches:
        outputs = strategy.forward(micro_batch.batch)
        progress()
        if micro_batch.ghost:
            continue
        with torch.no_grad():
            loss = model.loss(outputs, micro_batch.batch)
        row = table[micro_batch.shard]
        row[0], row[1], row[2] = loss.total, loss.count, len(micro_batch.indices)
        if "label" in micro_batch.batch:
            collection.update(outputs, micro_batch.batch["label"])
    if dist.get_world_size() > 1:
        add_disjoint(table)
    results = {name: metric.compute() for name, metric in collection.items(keep_base=True)}
    confusion = results.pop(CONFUSION, None)
    loss_sum, count, samples = table.sum(0).tolist()
    return Evaluation(
        samples=int(samples),
        values={"loss": loss_sum / count, **{name: float(value) for name, value in results.items()}},
        confusion=confusion.tolist() if confusion is not None and len(confusion) <= MOST_CLASSES else None,
    )
