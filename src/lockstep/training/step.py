"""One optimizer step: a function of the state, the step's samples and the step number, and of nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.contracts import LossSum, MicroBatch
from lockstep.optim import set_learning_rate
from lockstep.runtime.gradient_norm import gradients
from lockstep.training.state import TrainState


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind, still on the device."""

    loss: LossSum
    """Sums over the whole global batch."""
    norm: Tensor
    """Global gradient norm before clipping."""
    is_finite: Tensor
    """Whether loss and gradient are finite; a gradient that overflowed fp16 is the scaler's business, not counted."""
    rate: float
    """The learning rate it used."""

    def numbers(self) -> Tensor:
        """Mean loss, gradient norm and is_finite as float64 [3], without waiting for the device."""
        mean = self.loss.total.to(torch.float64) / self.loss.count
        return torch.stack([mean, self.norm.to(torch.float64), self.is_finite.to(torch.float64)])


def step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    *,
    clip: float | None,
    skip_non_finite: bool = False,
) -> Outcome:
    """Run step number state.step; nothing is committed before the gradient is whole on every rank."""
    loss = state.strategy.forward_backward(micro_batches)

    state.precision.unscale(state.optimizer)
    grads = gradients(list(state.module.parameters()))
    torch._foreach_div_(grads, torch.as_tensor(loss.count).to(torch.float64))
    norm = state.strategy.clip(clip)
    is_finite = torch.isfinite(loss.total)
    if not state.precision.is_scaled:
        is_finite = is_finite & torch.isfinite(norm)

    rate = state.rate(state.step)
    set_learning_rate(state.optimizer, rate)
    commit = not skip_non_finite or bool(is_finite)
    state.precision.apply(state.optimizer, commit=commit)
    if state.ema and commit:
        state.ema.update()
    state.skipped += not commit
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    return Outcome(loss, norm, is_finite, rate)
