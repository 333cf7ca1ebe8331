"""The objective that data and settings ask for, and the base class of models that learn it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, DataError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, Model, Outputs
from lockstep.models.objectives._objective import Objective, PredictingObjective

FAMILY = "models.objectives"
AUTO, OWN = "auto", "own"
TAGS = "token_classification"


def name_of(spec: DataSpec) -> str:
    """Return the objective that the data names, or that follows from its targets."""
    if spec.objective != AUTO:
        return spec.objective
    if spec.vocabulary is not None:
        return "causal_lm"
    if spec.numbers:
        return "regression"
    return "classification" if spec.labels else OWN


def objective_of(spec: DataSpec) -> Objective:
    """Build the objective of a model for this data. Raises ModelError where the data lacks what it needs."""
    name = name_of(spec)
    found: Objective = plugins.implementation(FAMILY, name).build()
    if not found.is_taught_by(spec):
        raise ModelError(
            f"model.objective={name} needs {found.NEEDS}, which this data does not have: choose the objective that "
            "fits the data, or leave it out"
        )
    return found


def with_objective(spec: DataSpec, requested: str) -> DataSpec:
    """Set the objective of a spec to model.objective, if it names one. Raises ModelError for classes of words that the
    data does not have, or that it has: their columns are padded in another way."""
    if TAGS in (requested, spec.objective) and requested not in (AUTO, OWN, spec.objective):
        raise ModelError(
            f"model.objective={requested} does not fit this data, whose objective is {spec.objective}: only "
            f"data.labels=tags, or DataSpec(objective={TAGS!r}) of your own source, gives a class for each word"
        )
    return spec if requested == AUTO else replace(spec, objective=requested)


def objective_of_classes(model: Model, setting: str) -> Objective:
    """Return the objective of a model, for a setting of its loss. Raises ConfigError unless its loss is of classes."""
    objective = None if getattr(model, "own_loss", None) else getattr(model, "objective", None)
    if not isinstance(objective, Objective) or not objective.SMOOTHS:
        whose = "this objective has no classes" if isinstance(objective, Objective) else "the model's own loss decides"
        raise ConfigError(f"{setting} is set, but {whose}: leave it out")
    return objective


def width_of(spec: DataSpec) -> int:
    """Return K, the number of outputs for each sample. Raises ModelError where the objective is not about samples."""
    found = objective_of(spec)
    if not isinstance(found, PredictingObjective):
        raise ModelError(
            f"model.objective={name_of(spec)} does not predict something for each sample, so this kind of model has no "
            "outputs for it: choose another model.kind, or bring a model with model.kind=user"
        )
    return found.width(spec)


class ObjectiveModel(Model):
    """A model with the loss of the objective, or the user's. Raises ModelError where the data does not fit it."""

    own_loss: Callable[[Outputs, Batch], LossSum] | None = None
    """The user's loss, in place of the objective's."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.objective = objective_of(spec)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        if self.own_loss is None:
            return self.objective.loss(outputs, batch)
        found = self.own_loss(outputs, batch)
        if torch.is_grad_enabled() or not isinstance(self.objective, PredictingObjective):
            return found
        with suppress(DataError, ModelError):  # the user's targets may be others
            found = replace(found, sums={**self.objective.loss(outputs, batch).sums, **found.sums})  # such as accuracy
        return found

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return self.objective.derived(means) if self.own_loss is None else {}
