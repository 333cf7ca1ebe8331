"""How a run recovers from the loss of a process where launch.recovery=auto leaves it open."""

import sys
from pathlib import Path

from lockstep.base import devices
from lockstep.launch.launch_config import LaunchSection
from lockstep.protocol import environment
from lockstep.recipe.recipe import Recipe

USUAL = {name: LaunchSection.model_fields[name].default for name in ("min_processes", "failure_timeout_seconds")}
"""Defaults of settings of restarts; where one is changed, launch.recovery=auto is not live."""
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of GPU drivers."""


def with_recovery(recipe: Recipe) -> Recipe:
    """Return the recipe with launch.recovery decided for a start on this machine. Raises LaunchError."""
    launch = recipe.launch
    if not launch.decides_recovery:
        return recipe
    is_live = may_recover_live(recipe) and not devices.count_gpus()
    is_live = is_live and launch.processes_here(recipe.run.threads, recipe.train.shards) > 1
    decided = launch.model_copy(update={"recovery": "live" if is_live else "restart"})
    return recipe.model_copy(update={"launch": decided})


def quieten_torch(recipe: Recipe) -> None:
    """Hide torch's C++ warnings, before its import, where this run may recover live, which causes them."""
    has_gpus = any(Path(device).exists() for device in GPUS)
    if may_recover_live(recipe) and not (recipe.launch.debug or has_gpus):
        environment.quieten_torch()


def may_recover_live(recipe: Recipe) -> bool:
    """Return whether a run recovers live on a machine with several cores and no GPUs.

    With `auto` only where nothing is lost by that: on one machine, without settings or observers that need restarts.
    """
    launch = recipe.launch
    if not launch.decides_recovery:
        return launch.recovers_live
    asks_for_restarts = launch.max_restarts == 0 or any(getattr(launch, name) != usual for name, usual in USUAL.items())
    is_possible = recipe.parallel.state_copies != 1 and recipe.train.batchnorm != "sync" and recipe.observe.file is None
    is_here = sys.platform == "linux" and not launch.SUBMITS and launch.max_nodes == 1 and launch.processes != 1
    return is_possible and is_here and not asks_for_restarts
