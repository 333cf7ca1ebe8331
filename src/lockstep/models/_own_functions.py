"""Functions of a user's Python file beside a model of any kind: loss, counts of the loss's terms, metrics."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from torch import nn

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Model, Outputs
from lockstep.core.numerics.loss import checked
from lockstep.models._model_config import ModelSection
from lockstep.models.objectives._choice import ObjectiveModel

Loss = Callable[[Outputs, Batch], LossSum]
TermCounts = Callable[[Batch], Mapping[str, float]]
FUNCTIONS = ("loss", "metrics", "optimizer", "schedule")
"""Names of the functions that the file of a model of Lockstep's own kinds may have."""


def build(section: ModelSection, spec: DataSpec) -> Model:
    """Build a model of any kind, with the loss in its file. Raises ModelError."""
    return with_own_loss(plugins.implementation("models", section.kind).build(section, spec), section)


def with_own_loss(model: Model, section: ModelSection) -> Model:
    """Give a model of Lockstep's own kinds the loss in its file, if it names one. Raises ModelError."""
    if section.code is None or not isinstance(model, ObjectiveModel):  # a model of kind=user has it
        return model
    module = plugins.load_file(section.code, "model.file")
    if callable(getattr(module, "build", None)):
        raise ModelError(
            f"{section.code} has a function build(), which model.kind={section.kind} does not call: set "
            "model.kind=user to train what it returns, or take build() out to use its loss and metrics"
        )
    if not any(callable(getattr(module, name, None)) for name in FUNCTIONS):
        raise ModelError(
            f"{section.code} has none of the functions that model.kind={section.kind} takes from a file: "
            f"{', '.join(FUNCTIONS)}"
        )
    if loss := chosen_loss(getattr(module, "loss", None)):
        model.term_counts = term_counts(module)
        model.own_loss = summed(loss, model.term_counts)
    return model


def chosen_loss(*candidates: Any) -> Loss | None:
    """Return the first that is a function of outputs and batch; None for the loss of the objective.

    An nn.Module named `loss` is not used, since it takes other arguments and returns a mean. Raises ModelError unless
    it is plain cross-entropy.
    """
    for loss in candidates:
        if is_function(loss, arguments=2):
            return cast(Loss, loss)
    for loss in candidates:
        is_plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0
        if isinstance(loss, nn.Module) and not is_plain:
            raise ModelError(
                f"`loss` is an nn.{type(loss).__name__}, which is a mean over the micro-batch: write a function "
                "`loss(outputs, batch)` that returns LossSum(total, count), with reduction='sum'"
            )
    return None


def term_counts(*owners: Any) -> TermCounts | None:
    """Return the first function `term_counts(batch)` of these modules."""
    candidates = (getattr(owner, "term_counts", None) for owner in owners)
    return next((each for each in candidates if is_function(each, arguments=1)), None)


def summed(loss: Loss, counts: TermCounts | None) -> Loss:
    """Wrap a user's loss in checks, which raise ModelError for no sums, or for terms without `term_counts`."""

    def own_loss(outputs: Outputs, batch: Batch) -> LossSum:
        try:
            result = loss(outputs, batch)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            error.add_note(
                "loss(outputs, batch) gets what forward() has returned, and then the batch, a dict of tensors, here "
                f"with: {', '.join(batch)}"
            )
            raise
        result = checked(result)
        if result.terms and counts is None:
            raise ModelError(
                f"the loss has the terms {sorted(result.terms)}, but there is no function term_counts(batch) beside "
                "it, which tells what they count: the counts of all processes have to be known before the backward pass"
            )
        return result

    return own_loss


def is_function(value: Any, *, arguments: int) -> bool:
    """Return whether a value is a function or method that accepts this number of positional arguments."""
    if not inspect.isroutine(value) and not isinstance(value, partial):
        return False
    try:
        inspect.signature(value).bind(*[None] * arguments)
    except (TypeError, ValueError):
        return False
    return True


def own_metrics(section: ModelSection, spec: DataSpec) -> dict[str, Any]:
    """Call the file's `metrics(spec)`: torchmetrics by name; empty when there is no such function."""
    make = section.code and getattr(plugins.load_file(section.code, "model.file"), "metrics", None)
    return make(spec) if make else {}
