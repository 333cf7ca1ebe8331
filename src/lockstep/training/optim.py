"""The optimizer, and its learning rate as a function of the step alone."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import nn

from lockstep.base.config import MANY, Section
from lockstep.training.fused_tails import Tails


class OptimSection(Section):
    """How weights are updated."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """adamw (I. Loshchilov, F. Hutter, Decoupled Weight Decay Regularization, 2019) or sgd with momentum."""
    lr: float = Field(1e-3, gt=0, le=1e6)
    """Learning rate at the peak of the schedule, before the linear rule."""
    base_batch: int | None = Field(None, ge=1, le=MANY)
    """The global batch that `lr` was found for: the rate used is lr * global_batch / base_batch (the linear rule of
    P. Goyal et al., Accurate, Large Minibatch SGD, 2017). Leave empty to use `lr` as it is."""
    weight_decay: float = Field(0.01, ge=0, le=1e3)
    """Decay of matrices and kernels; norms and biases (tensors of one axis) are never decayed."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it. Empty for none."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd; beta 1 of adamw."""
    beta2: float = Field(0.999, gt=0, lt=1)
    """Beta 2 of adamw; sgd has none."""


class ScheduleSection(Section):
    """The learning rate over the run."""

    shape: Literal["linear", "cosine", "constant"] = "linear"
    """How the rate goes from its peak to the end of the run: down to 0 on a line or a cosine, or not at all."""
    warmup: float = Field(0.0, ge=0, le=MANY)
    """Steps of linear rise at the start: a fraction of the run if below 1, else a number of steps."""

    @field_validator("warmup")
    @classmethod
    def _is_fraction_or_whole(cls, warmup: float) -> float:
        if warmup > 1 and not warmup.is_integer():
            raise ValueError("should be a fraction of the run, from 0 to 1, or a whole number of steps")
        return warmup

    def warmup_steps(self, total_steps: int) -> int:
        """How many of a run's steps the rise takes; a number that was given in steps may be more than the run has."""
        return round(self.warmup * total_steps) if self.warmup < 1 else round(self.warmup)


def build(config: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over a module's parameters, fused into one kernel, whose bits do not depend on how they are cut."""
    optimizer = _fused(config, module)
    if any(p.device.type == "cpu" for p in module.parameters()):
        Tails(optimizer)
    return optimizer


def _fused(config: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": _where(named, lambda p: p.ndim >= 2), "weight_decay": config.weight_decay},
        {"params": _where(named, lambda p: p.ndim < 2), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, config.beta2), fused=True)


def _where(named: Iterable[tuple[str, nn.Parameter]], test) -> list[nn.Parameter]:  # type: ignore[no-untyped-def]
    return [parameter for _, parameter in named if test(parameter)]


def learning_rate(
    optim: OptimSection, schedule: ScheduleSection, *, step: int, total_steps: int, global_batch: int
) -> float:
    """The rate of step `step` (from 0) of `total_steps`: peak x warm-up x shape."""
    peak = optim.lr * (global_batch / optim.base_batch if optim.base_batch else 1.0)
    warmup = schedule.warmup_steps(total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.shape == "constant":
        return peak
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return peak * ((1 - done) if schedule.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
