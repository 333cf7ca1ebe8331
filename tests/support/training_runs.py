"""Recipes of small runs, trained in ranks of the test pool."""

import json
from contextlib import chdir
from functools import partial

import torch.distributed as dist

from lockstep.base.errors import LockstepError
from lockstep.base.world import World
from lockstep.core.host.signals import SignalWatch
from lockstep.recipe import recipe as recipes
from lockstep.recipe.recipe import Recipe
from lockstep.run.tasks.train import TrainTask


class StopAfter(SignalWatch):
    """Asks for an end once so many steps are done, as a signal would."""

    def __init__(self, step):
        super().__init__()
        self.step, self.job = step, None

    def requested(self):
        return self.job is not None and self.job.reached >= self.step


def run_on_rank(config, resume="auto", stop_after=None, allow_drift=False, hooks=None):
    """One run of this rank -> (summary or error message)."""
    recipe = Recipe.model_validate(config)
    interruption = StopAfter(stop_after) if stop_after else SignalWatch()
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    job = TrainTask(recipe, world, interruption)
    if hooks is not None:
        job.starting = partial(hooks.starting, job)
    interruption.job = job
    job.reached = 0
    job.bus.subscribe(Reached(job))
    try:
        job.run(resume, allow_drift=allow_drift)
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        job.close()
    return json.loads((recipe.folder / "summary.json").read_text()) if rank == 0 else None


def run_in(folder, config):
    """One run of this rank, with paths from a folder -> (summary or error message)."""
    with chdir(folder):
        return run_on_rank(config)


def trained(ranks, file, name, *settings):
    """Train a config file's run, in as many ranks as it asks for -> summary. It is in runs/ beside the file."""
    with chdir(file.parent):
        recipe = recipes.load(file, [f"run.name={name}", *settings])
    config = recipe.model_dump(mode="json")
    summary, *_ = ranks(recipe.launch.processes, run_in, file.parent, config)
    assert isinstance(summary, dict), summary
    return summary


class Reached:
    def __init__(self, job):
        self.job = job

    def notice(self, event):
        self.job.reached = max(self.job.reached, getattr(event, "step", 0))

    def close(self):
        pass


def config_in(folder, name, **sections):
    """A short run on the digits: 200 samples, 7 steps of 32 in micro-batches of 8, with a ragged tail of 8."""
    base = {
        "run": {"dir": str(folder), "name": name},
        "data": {"limit": 200},
        "train": {"epochs": 2, "global_batch": 32, "micro_batch": 8},
        "observe": {"sinks": ["jsonl"], "log_every": 1},
        "checkpoint": {"every_steps": 5},
    }
    return {key: {**base.get(key, {}), **sections.get(key, {})} for key in {*base, *sections}}


def lines(folder, name):
    """Logged lines without what depends on the clock."""
    found = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "samples_per_second"} for line in found]
