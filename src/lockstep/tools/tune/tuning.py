"""Finds values for a config by trying them; a run itself never changes them."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lockstep.base.errors import ConfigError
from lockstep.base.world import World
from lockstep.core.distributed.process_group import device_of
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.run.recipe import Recipe
from lockstep.tools.trials import prepared
from lockstep.tools.tune import learning_rate_finder, micro_batch_finder


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is to be found, and how."""

    micro_batch: bool
    rate: bool
    memory_gb: float | None
    """What one process may use; None: what the machine allows."""
    start: float
    """The first rate of the sweep, as used: after the linear rule."""
    stop: float
    """The last one."""
    steps: int
    picture: Path
    """Where the curve is drawn, as SVG."""


def tune(recipe: Recipe, wishes: TuneOptions, *, console: Console) -> int:
    """Find what is wished for and print it; returns 0, or 1 where no learning rate can be suggested.

    Raises ConfigError for wishes that cannot be fulfilled, TrialFailed when the model or the data fails.
    """
    rates = checked(wishes)
    with ended_by_sigterm():
        found = searched(recipe, wishes, rates, console=console)
    if found:
        console.print("\nLines for the config (a run itself never changes them):\n")
    for section, values in found.items():
        console.print(f"{section}:\n" + "\n".join(f"  {key}: {value}" for key, value in values.items()))
    return 1 if wishes.rate and "optim" not in found else 0


def searched(
    recipe: Recipe, wishes: TuneOptions, rates: tuple[float, ...], *, console: Console
) -> dict[str, dict[str, float]]:
    """What has been found, by section and setting. The rate is that of the micro-batch found before it."""
    samples = len(prepared(recipe).train)
    found: dict[str, dict[str, float]] = {}
    if wishes.micro_batch:
        on_gpu = device_of(World()).type == "cuda"
        budget = micro_batch_finder.budget_of(recipe, wishes.memory_gb, on_gpu=on_gpu)
        m = micro_batch_finder.find(recipe, budget, samples=samples, console=console)
        found["train"] = {"micro_batch": m}
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=found["train"])})
    if wishes.rate:
        if wishes.micro_batch:
            console.print()
        rate = learning_rate_finder.find(recipe, rates, picture=wishes.picture, console=console)
        if rate is not None:
            found["optim"] = {"lr": rate}
    return found


def checked(wishes: TuneOptions) -> tuple[float, ...]:
    """The rates of the sweep. Raises ConfigError for a wish that makes no sense."""
    if not (wishes.micro_batch or wishes.rate):
        raise ConfigError("say what to look for: --micro-batch, --lr, or both")
    if wishes.memory_gb is not None and not 0 < wishes.memory_gb < math.inf:
        raise ConfigError(f"--memory {wishes.memory_gb:g}: give GB above 0, such as --memory 8, or leave it out")
    if wishes.memory_gb is not None and not wishes.micro_batch:
        raise ConfigError("--memory belongs to --micro-batch, which is not asked for")
    if wishes.rate and wishes.picture.suffix != ".svg":
        raise ConfigError(f"--out {wishes.picture}: the curve is an SVG file, so let its name end in .svg")
    folder = wishes.picture.absolute().parent
    if wishes.rate and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"cannot write to {folder}; name a file in another folder with --out")
    return learning_rate_finder.rates_of(wishes.start, wishes.stop, wishes.steps)
