"""Results of steps: read from the device, checked, published, and added to a digest of all steps."""

import hashlib
import math
import struct

import torch

from lockstep.base.errors import NonFiniteLoss
from lockstep.base.events import EpochDone, Evaluated, Spiked, Steered, StepDone, TextsGenerated, Warned
from lockstep.base.model_contracts import SAMPLES
from lockstep.core.numerics.loss import shown
from lockstep.training.loop_state import Training
from lockstep.training.step import Outcome

CHAIN_LENGTH = 16
"""Hex digits, 64 bits: a million steps collide by chance in one of 10^13 runs."""


def link(chain: str, step: int, *, loss: float, norm: float, rate: float) -> str:
    """Extend the chain by a step: sha256 over the chain, the step number, and loss, gradient norm and learning rate as
    float64. Two runs are equal up to the last step at which their chains are equal.

    All NaNs count as one, since IEEE 754 does not define which an operation returns.
    """
    numbers = [value if value == value else math.nan for value in (loss, norm, rate)]
    return hashlib.sha256(chain.encode() + struct.pack("<q3d", step, *numbers)).hexdigest()[:CHAIN_LENGTH]


def publish_once(run: Training, event: StepDone | EpochDone | Evaluated | TextsGenerated | Steered) -> None:
    """Publish an event of the current step, unless that was done before a process was lost."""
    if run.progress.published.get(type(event)) != event.step:
        run.progress.published[type(event)] = event.step
        run.bus.publish(event)


def publish_step(run: Training) -> None:
    """Publish the last step; if it is logged, read all outcomes from the device and publish their values."""
    state, outcome = run.state, run.outcome
    if outcome is None or run.progress.published.get(StepDone) == state.step:
        return
    if not run.is_logged:
        publish_once(run, StepDone(step=state.step, epoch=run.epoch))
        return
    loss = outcome.loss
    mean, norm = read_outcomes(run)
    means = {**{name: float(outcome.mean(value)) for name, value in loss.sums.items()}, "loss": mean}
    values = shown({**means, **run.derived(means)})
    values |= {"learning_rate": outcome.rate, "gradient_norm": norm}
    speed = run.throughput.look(run.samples_at(state.step))
    if speed is not None:
        values["samples_per_second"] = speed
        if samples_per_token := means.get(SAMPLES):
            values["tokens_per_second"] = speed / samples_per_token
            if run.token_seconds is not None:
                values["mfu"] = values["tokens_per_second"] * run.token_seconds
    publish_once(run, StepDone(step=state.step, epoch=run.epoch, values=values, chain=state.chain))


def read_outcomes(run: Training) -> tuple[float, float]:
    """Copy the unread outcomes from the device at once, add them to the digest chain and check that they are finite.
    Returns loss and gradient norm of the last step, NaN if there was none to read; the same on every rank."""
    unread, run.unread = run.unread, []
    if not unread:
        return math.nan, math.nan
    table = torch.stack([outcome.numbers() for _, outcome in unread]).tolist()
    failed = []
    for (number, outcome), (loss, norm, is_finite, is_empty) in zip(unread, table, strict=True):
        run.state.chain = link(run.state.chain, number, loss=loss, norm=norm, rate=outcome.rate)
        if jumps := run.state.spikes.look(number, loss=loss, gradient_norm=norm):
            run.bus.publish(Spiked(step=number, values=jumps, run=run.replayed))
        if is_empty:
            what = f"step {number} was skipped: its loss counts nothing (the count of each of its micro-batches is 0)"
            run.bus.publish(Warned(message=f"{what}; look at the labels, or masks, of its samples"))
        if not is_finite:
            failed.append((number, outcome))
    _check_finite(run, failed)
    return table[-1][0], table[-1][1]


def _check_finite(run: Training, failed: list[tuple[int, Outcome]]) -> None:
    """Raise NonFiniteLoss, or warn, with the samples of each step whose loss or gradient is not finite."""
    for number, outcome in failed:
        assert outcome.loss.by_shard is not None
        bad = torch.nonzero(~torch.isfinite(outcome.loss.by_shard)).flatten().tolist()
        where = "; ".join(run.describe(number - 1, shard) for shard in bad[:3])
        what = f"the loss became NaN or infinite in step {number}: {where}"
        if not bad:
            what = f"the gradient became NaN or infinite in step {number}, though its loss is finite"
        if run.train.non_finite != "stop":
            run.bus.publish(Warned(message=f"{what} (train.non_finite={run.train.non_finite})"))
            continue
        raise NonFiniteLoss(
            f"{what}\n  Nothing was saved since. Look at these samples, lower optim.lr, add schedule.warmup or "
            "optim.clip;\n  or set train.non_finite=skip to leave such steps out."
        )
