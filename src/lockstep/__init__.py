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
    from lockstep.inference.evaluate.evaluate_model import EvaluationResult as EvaluationResult
    from lockstep.inference.generation.generator import Generated as Generated
    from lockstep.inference.loaded_model import LoadedModel as LoadedModel
    from lockstep.inference.loaded_model import load as load
    from lockstep.loop.own_loop import Loop as Loop
    from lockstep.loop.own_loop import seed as seed
    from lockstep.models.objectives._answers import ClassAnswer as ClassAnswer
    from lockstep.models.objectives._answers import ClassesAnswer as ClassesAnswer
    from lockstep.models.objectives._answers import NumbersAnswer as NumbersAnswer
    from lockstep.models.objectives._answers import WordsAnswer as WordsAnswer
    from lockstep.run.api import Export as Export
    from lockstep.run.api import Run as Run
    from lockstep.run.api import evaluate as evaluate
    from lockstep.run.api import export as export
    from lockstep.run.api import spawn as spawn
    from lockstep.run.api import train as train

    __version__: str

LOADED = ("ClassAnswer", "ClassesAnswer", "Generated", "LoadedModel", "NumbersAnswer", "WordsAnswer", "load")
API = ("EvaluationResult", "Export", "Run", "evaluate", "export", "spawn", "train")
LOOP = ("Loop", "seed")
STEERING = ("Evaluate", "Save", "ScaleLearningRate", "Stop")
__all__ = [
    "ClassAnswer",
    "ClassesAnswer",
    "DataSpec",
    "Evaluate",
    "EvaluationResult",
    "Export",
    "Generated",
    "LoadedModel",
    "Loop",
    "LossSum",
    "Model",
    "NumbersAnswer",
    "Run",
    "Save",
    "ScaleLearningRate",
    "Source",
    "Stop",
    "TensorPlan",
    "WordsAnswer",
    "__version__",
    "evaluate",
    "export",
    "load",
    "seed",
    "spawn",
    "train",
]

if not TYPE_CHECKING:  # else a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version("lockstep-train")
        if name in LOADED:
            from lockstep.inference import loaded_model

            return getattr(loaded_model, name)
        if name in API:
            from lockstep.run import api

            return getattr(api, name)
        if name in LOOP:
            from lockstep.loop import own_loop

            return getattr(own_loop, name)
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
