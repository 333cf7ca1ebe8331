"""Base class of models whose loss is that of the objective."""

from collections.abc import Mapping

from lockstep.base.contracts import DataSpec
from lockstep.base.model_contracts import Batch, LossSum, Model, Outputs
from lockstep.models.objectives._choice import objective_of


class ObjectiveModel(Model):
    """Raises ModelError where the data lacks what the objective needs."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.objective = objective_of(spec)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        return self.objective.loss(outputs, batch)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return self.objective.derived(means)
