"""One optimizer step: a function of the state, the step's samples and the step number only."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.host.phases import phase
from lockstep.core.numerics.loss import with_term_weights
from lockstep.core.reduction.gradient_norm import average_, gradients
from lockstep.training.learning_rate import set_learning_rate
from lockstep.training.state import TrainState

NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""Part of torch's message."""


@dataclass(frozen=True)
class Outcome:
    """Result of a step, still on the device."""

    loss: LossSum
    """Sums over the whole global batch."""
    norm: Tensor
    """Global gradient norm before clipping."""
    is_finite: Tensor
    """Whether loss and gradient (in fp16 the loss; the scaler handles overflows) are finite, or the count is 0."""
    rate: float

    def numbers(self) -> Tensor:
        """Return mean loss, gradient norm, is_finite and is_empty as float64 [4], without a device synchronisation."""
        count = torch.as_tensor(self.loss.count, dtype=torch.float64, device=self.norm.device)
        mean = self.mean(self.loss.total)
        return torch.stack([each.to(torch.float64) for each in (mean, self.norm, self.is_finite, count == 0)])

    def mean(self, total: Tensor) -> Tensor:
        """Divide a sum by the step's count of samples or tokens; 0 if the count is 0."""
        count = torch.as_tensor(self.loss.count, dtype=torch.float64, device=total.device)
        return total.to(torch.float64) / torch.where(count == 0, 1.0, count)


def step(
    state: TrainState, micro_batches: Sequence[MicroBatch], *, clip: float | None, skip_non_finite: bool = False
) -> Outcome:
    """Run step number state.step. The state changes only once the gradient is complete on every rank, and the weights
    not at all if the loss has count 0."""
    if state.term_counts is not None:
        micro_batches = with_term_weights(micro_batches, state.term_counts)
    with explained_nondeterminism(state.module):
        loss = (state.recheck or state.strategy.forward_backward)(micro_batches)
    with phase("optimizer"):
        return update(state, loss, clip=clip, skip_non_finite=skip_non_finite)


@contextmanager
def explained_nondeterminism(module: nn.Module) -> Iterator[None]:
    """Raise ModelError, naming the modules that seem to run it, where an operation has no deterministic form."""
    try:
        yield
    except RuntimeError as error:
        if NOT_DETERMINISTIC not in str(error):
            raise
        operation = str(error).partition(" ")[0]
        kind = operation.replace("_", "").lower()
        kinds = {name: type(each).__name__ for name, each in module.named_modules()}
        users = [f"{name} ({each})" for name, each in kinds.items() if each.lower() in kind]
        raise ModelError(
            f"{operation}{f' of {few(users)}' if users else ''} gives other bits each time on this device, and torch "
            "has no other implementation: use another operation, or set run.reproducibility=fast, with which weights "
            "are not the same bits again"
        ) from error


def update(state: TrainState, loss: LossSum, *, clip: float | None, skip_non_finite: bool) -> Outcome:
    """Apply the gradients of a step, sums over all ranks, and count it."""
    state.precision.unscale(state.optimizer)
    for parameter in state.held_parameters():
        gradients([parameter])[0].zero_()  # not None: the norm's order of additions is that of all gradients
    norm = state.strategy.norm()
    apply = partial(_apply, state, loss, norm, clip=clip, skip_non_finite=skip_non_finite)
    if state.confirm is not None:
        state.ready_step = apply
        state.confirm()
        state.ready_step = None
    return apply()


def _apply(state: TrainState, loss: LossSum, norm: Tensor, *, clip: float | None, skip_non_finite: bool) -> Outcome:
    """Apply the gradients, without collectives unless the user's optimizer has some."""
    state.is_applying = True
    state.seed("update")  # the user's optimizer or schedule may draw
    is_empty = not loss.is_counted and bool(loss.count == 0)
    if not is_empty:
        grads, count = gradients(list(state.module.parameters())), torch.as_tensor(loss.count).to(torch.float64)
        limits = {"max_norm": clip, "max_value": state.clip_value}
        norm = average_(grads, norm, count=count, touched_rows=state.strategy.touched_rows, **limits)
    is_finite = torch.isfinite(loss.total)
    if not state.precision.is_scaled:
        is_finite = is_finite & torch.isfinite(norm)

    if state.rate is None:
        rate = float(state.optimizer.param_groups[0]["lr"])
    else:
        rate = state.rate(state.step) * state.rate_factor
        set_learning_rate(state.optimizer, rate)
    for parameter in state.held_parameters():
        parameter.grad = None
    commit = not is_empty and (not skip_non_finite or bool(is_finite))
    state.precision.apply(state.optimizer, commit=commit, is_empty=is_empty)
    if commit:
        state.update_copies()
        if state.ema:
            state.ema.update()
    for updates in state.strategy.buffer_updates:
        updates.keep_step()
    state.skipped += not commit
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.is_applying = False
    return Outcome(loss, norm, is_finite | is_empty, rate)


def undo(state: TrainState) -> None:
    """Undo a failed step, for it to be run again."""
    state.ready_step = None
    for updates in state.strategy.buffer_updates:
        updates.undo_step()
    state.precision.undo_unscaling()
    state.optimizer.zero_grad(set_to_none=True)
