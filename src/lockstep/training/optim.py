"""The optimizer, and the learning rate as a function of the step."""

import math
from typing import Any

import torch
from torch import nn

from lockstep.training.fused_optimizer_tails import FusedTails
from lockstep.training.optim_config import OptimSection, ScheduleSection


def build(config: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """Build a fused optimizer whose results do not depend on how the parameters are sharded."""
    optimizer = _fused(config, module)
    if any(p.device.type == "cpu" for p in module.parameters()):
        FusedTails(optimizer)
    return optimizer


def _fused(config: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, config.beta2), fused=True)


def learning_rate(
    optim: OptimSection, schedule: ScheduleSection, *, step: int, total_steps: int, global_batch: int
) -> float:
    """Learning rate of step `step` (from 0): peak x warm-up x schedule."""
    peak = optim.lr * (global_batch / optim.base_batch if optim.base_batch else 1.0)
    warmup = schedule.warmup_steps(total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.shape == "constant":
        return peak
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return peak * ((1 - done) if schedule.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
