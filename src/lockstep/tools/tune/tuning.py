"""Finds values for a config by trying them; a run itself never changes them."""

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lockstep.base.errors import ConfigError
from lockstep.base.world import World
from lockstep.core.distributed.process_group import device_of
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.recipe.recipe import Recipe
from lockstep.tools.trials import check_writable, prepared
from lockstep.tools.tune import learning_rate_finder, micro_batch_finder


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    micro_batch: bool
    """Whether to find the micro-batch."""
    rate: bool
    """Whether to find a learning rate."""
    memory_gb: float | None
    """Limit of one process; None: what the machine allows."""
    start: float
    """The first rate of the sweep, after the linear rule."""
    stop: float
    """The last rate of the sweep."""
    steps: int
    picture: Path
    """File of the curve, an SVG."""


def tune(recipe: Recipe, options: TuneOptions, *, console: Console) -> int:
    """Find what is asked for and print it; returns 0, or 1 where no learning rate can be suggested.

    Raises ConfigError for options that cannot be met, TrialFailed when the model or the data fails.
    """
    rates = checked(options)
    with ended_by_sigterm():
        settings = search(recipe, options, rates, console=console)
    if settings:
        console.print("\nLines for the config (a run itself never changes them):\n")
    for section, values in settings.items():
        console.print(f"{section}:\n" + "\n".join(f"  {key}: {value}" for key, value in values.items()))
    return 1 if options.rate and "optim" not in settings else 0


def search(
    recipe: Recipe, options: TuneOptions, rates: tuple[float, ...], *, console: Console
) -> dict[str, dict[str, float]]:
    """Search -> section -> setting -> value. The learning rate is searched with the micro-batch found before."""
    samples = len(prepared(recipe).train)
    settings: dict[str, dict[str, float]] = {}
    if options.micro_batch:
        on_gpu = device_of(World()).type == "cuda"
        budget = micro_batch_finder.budget_of(recipe, options.memory_gb, on_gpu=on_gpu)
        m = micro_batch_finder.find(recipe, budget, samples=samples, console=console)
        settings["train"] = {"micro_batch": m}
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=settings["train"])})
    if options.rate:
        if options.micro_batch:
            console.print()
        rate = learning_rate_finder.find(recipe, rates, picture=options.picture, console=console)
        if rate is not None:
            settings["optim"] = {"lr": rate}
    return settings


def checked(options: TuneOptions) -> tuple[float, ...]:
    """Return the rates of the sweep. Raises ConfigError for options that make no sense."""
    if not (options.micro_batch or options.rate):
        raise ConfigError("say what to look for: --micro-batch, --lr, or both")
    if options.memory_gb is not None and not 0 < options.memory_gb < math.inf:
        raise ConfigError(f"--memory {options.memory_gb:g}: give GB above 0, such as --memory 8, or leave it out")
    if options.memory_gb is not None and not options.micro_batch:
        raise ConfigError("--memory belongs to --micro-batch, which is not asked for")
    if options.rate and options.picture.suffix != ".svg":
        raise ConfigError(f"--out {options.picture}: the curve is an SVG file, so let its name end in .svg")
    if options.rate:
        check_writable("--out", options.picture)
    return learning_rate_finder.rates_of(options.start, options.stop, options.steps)
