"""The learning rate as a function of the step alone."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.base import plugins
from lockstep.base.errors import ConfigError
from lockstep.training.optim_config import OptimSection, ScheduleSection

OwnSchedule = Callable[[int, int], float]
"""(step, total steps) -> fraction of the peak."""
SCALE = "lr_scale"
"""Key of a parameter group: its learning rate as a multiple of the run's."""
LOWEST_OF_CYCLE = 1 / 25
"""Start of one_cycle, as a fraction of the peak; as in torch.optim.lr_scheduler.OneCycleLR."""


def learning_rate(
    optim: OptimSection,
    schedule: ScheduleSection,
    *,
    step: int,
    total_steps: int,
    global_batch: int,
    own: OwnSchedule | None = None,
) -> float:
    """Return the learning rate of step `step` (from 0): peak x warm-up x schedule. `own`: the user's schedule."""
    peak = optim.lr * (global_batch / optim.base_batch if optim.base_batch else 1.0)
    if own is not None:
        return peak * own(step, total_steps)
    warmup = schedule.warmup_steps(total_steps)
    place = {"step": step, "warmup": warmup, "total_steps": total_steps}
    if schedule.shape == "one_cycle":
        return peak * _one_cycle(schedule, **place)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * _after_warmup(schedule, **place)


def _after_warmup(schedule: ScheduleSection, *, step: int, warmup: int, total_steps: int) -> float:
    """Return the fraction of the peak. Sources: wsd with 1 - sqrt, A. Hägele et al., Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations, 2024; inverse_sqrt, A. Vaswani et al., Attention Is All You Need, 2017."""
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    if schedule.shape == "wsd":
        left, decay = total_steps - step, schedule.decay_steps(total_steps)
        return 1.0 if left > decay else _down(schedule.final, 1 - math.sqrt(1 - max(left, 0) / decay))
    if schedule.shape == "cosine":
        return _down(schedule.final, 0.5 * (1 + math.cos(math.pi * done)))
    return _down(schedule.final, 1 - done if schedule.shape == "linear" else (1 - done) ** schedule.power)


def _down(final: float, height: float) -> float:
    """Return the fraction of the peak; height 1 is the peak, height 0 the end."""
    return final + (1 - final) * height if final else height


def _one_cycle(schedule: ScheduleSection, *, step: int, warmup: int, total_steps: int) -> float:
    """Return a fraction; the peak is in the rise's last step. Source: L. Smith, N. Topin, Super-Convergence, 2018."""
    top, end = max(warmup - 1, 0), max(total_steps - 1, 1)
    if step <= top:
        low, done = LOWEST_OF_CYCLE, (top - step) / max(top, 1)
    else:
        low, done = schedule.final, min((step - top) / max(end - top, 1), 1.0)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))


def own_schedule(schedule: ScheduleSection, model_file: Path | None) -> OwnSchedule | None:
    """Return the user's schedule; None for other shapes. Raises ConfigError where the file has none."""
    if schedule.shape != "user":
        return None
    setting, file = ("schedule.file", schedule.file) if schedule.file else ("model.file", model_file)
    if file is None:
        raise ConfigError("schedule.shape=user needs schedule.file: the Python file with schedule(step)")
    function = getattr(plugins.load_file(file, setting), "schedule", None)
    if not callable(function):
        raise ConfigError(f"{file} has no function schedule(step) that returns the fraction of the peak")
    takes_total = len(inspect.signature(function).parameters) > 1

    def own(step: int, total_steps: int) -> float:
        factor = function(step, total_steps) if takes_total else function(step)
        return checked_factor(factor, f"schedule({step}) in {file}")

    return own


def checked_factor(factor: Any, what: str) -> float:
    """Return what a user's schedule, named by `what`, returned. Raises ConfigError where it is no factor of a rate."""
    try:
        number = math.nan if isinstance(factor, str) else float(factor)  # also of numpy and of a tensor
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{what} returned {factor!r}: it is a number, at least 0")
    return number


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group, times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(SCALE, 1.0)
