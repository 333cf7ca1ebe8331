"""Everything that changes while training, and that a checkpoint has to bring back."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.model_contracts import Batch, Strategy
from lockstep.core.modules.dtensors import local_tensor
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.training.ema import MovingAverage
from lockstep.training.optim import set_learning_rate


@dataclass(kw_only=True)
class StepRecord:
    """The best evaluation so far, and how long ago it was."""

    best: float | None = None
    evaluations_since: int = 0


@dataclass(kw_only=True)
class TrainState:
    """Weights, optimizer and the few numbers beside them; data position and randomness follow from `step`."""

    strategy: Strategy
    module: nn.Module
    """The placed module: the strategy's own parameters under canonical names."""
    optimizer: torch.optim.Optimizer
    precision: Precision
    rate: Callable[[int], float]
    """Learning rate of a step."""
    randomness: Randomness | None = None
    """What seeds the forward passes."""
    term_counts: Callable[[Batch], Mapping[str, float]] | None = None
    """What the terms of the model's loss count in a batch; None where it has none."""
    ema: MovingAverage | None = None
    step: int = 0
    """Steps done."""
    skipped: int = 0
    """Steps without an update, because their loss was not finite, or counted nothing."""
    chain: str = ""
    """Stands for every step that has been read from the device: all that are done, whenever it is saved."""
    drift: list[dict[str, Any]] = field(default_factory=list)
    """Numeric fields that another value was allowed for on a resume: step, field, before, now."""
    stopping: StepRecord = field(default_factory=StepRecord)
    saving: StepRecord = field(default_factory=StepRecord)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this rank holds, or its part of it, by a flat, canonical name: model.*, ema.*,
        optimizer.PARAMETER.*. They are the live ones: a checkpoint is read into them."""
        spread = self.strategy.sharded
        return {
            **{f"model.{name}": tensor for name, tensor in self.strategy.state().items()},
            **{f"ema.{n}": spread(n, tensor) for n, tensor in (self.ema.tensors() if self.ema else {}).items()},
            **{
                f"optimizer.{name}.{key}": spread(name, value) if value.shape == parameter.shape else value
                for name, parameter in self.module.named_parameters()  # as DCP names them, in a tenth of the time
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if isinstance(value, Tensor)
            },
        }

    def used(self) -> dict[str, str]:
        """The weights and buffers that are evaluated and exported: name in the model -> name in `tensors`. With a
        moving average it is the average in the place of the parameters, under each of a tied one's names."""
        state = self.strategy.state()
        averaged = {_memory(state[name]): name for name in (self.ema.tensors() if self.ema else {})}
        return {
            name: f"ema.{averaged[_memory(tensor)]}" if _memory(tensor) in averaged else f"model.{name}"
            for name, tensor in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """The numbers that are no tensors."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "chain": self.chain,
            "drift": list(self.drift),
            "scaler": self.precision.state_dict(),
            "stopping": vars(self.stopping).copy(),
            "saving": vars(self.saving).copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.skipped = state["step"], state["skipped"]
        self.chain, self.drift = state["chain"], list(state["drift"])
        self.precision.load_state_dict(state["scaler"])
        self.stopping, self.saving = StepRecord(**state["stopping"]), StepRecord(**state["saving"])

    @contextmanager
    def for_use(self) -> Iterator[None]:
        """The weights that are evaluated and exported, in evaluation mode; training's own again afterwards."""
        self.module.eval()
        try:
            if self.ema is None:
                yield
            else:
                with self.ema.in_place():
                    yield
        finally:
            self.module.train()


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    """What tied weights have in common."""
    return local_tensor(tensor).data_ptr(), tensor.shape


def initialise(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state (moments, momentum) for every parameter, as zeros, before the first step.

    Made at the first step it would be missing where a parameter is not used, and on a CPU the fused SGD would leave it
    unset when that step's fp16 gradients overflow.
    """
    set_learning_rate(optimizer, 0.0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # an empty one: optimizers make their state in the first
    optimizer.zero_grad(set_to_none=True)
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                value.zero_()
