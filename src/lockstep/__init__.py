"""The Python API, and the interfaces that a user's file implements. Importing this imports nothing else."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.base.contracts import DataSpec as DataSpec
    from lockstep.base.contracts import Source as Source
    from lockstep.base.model_contracts import LossSum as LossSum
    from lockstep.base.model_contracts import Model as Model
    from lockstep.base.model_contracts import TensorPlan as TensorPlan
    from lockstep.base.steering_requests import Evaluate as Evaluate
    from lockstep.base.steering_requests import Save as Save
    from lockstep.base.steering_requests import ScaleLearningRate as ScaleLearningRate
    from lockstep.base.steering_requests import Stop as Stop
    from lockstep.run.api import spawn as spawn

    __version__: str

STEERING = ("Evaluate", "Save", "ScaleLearningRate", "Stop")
__all__ = ["DataSpec", "LossSum", "Model", "Source", "TensorPlan", "__version__", "spawn", *STEERING]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lockstep-train")
    if name == "spawn":
        from lockstep.run.api import spawn

        return spawn
    if name in ("DataSpec", "Source"):
        from lockstep.base import contracts

        return getattr(contracts, name)
    if name in STEERING:
        from lockstep.base import steering_requests

        return getattr(steering_requests, name)
    if name in __all__:
        from lockstep.base import model_contracts

        return getattr(model_contracts, name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
