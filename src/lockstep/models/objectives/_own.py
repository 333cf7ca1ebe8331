"""A loss of the user's own, with nothing known of what the outputs mean."""

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, Outputs
from lockstep.models.objectives._objective import Objective


class Own(Objective):
    """Objective that the user's file defines."""

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        raise ModelError(
            "nothing says what the model learns: the data has neither classes nor numbers to predict. Write "
            "loss(outputs, batch) -> LossSum in the model's file, give the data's DataSpec labels or numbers, or name "
            "model.objective"
        )


build = Own
