"""Runs with each optimizer, in ranks of the test pool."""

import torch
import torch.distributed as dist

from lockstep.base.world import World
from lockstep.core.numerics.precision import fix_numerics
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes
from lockstep.training.step import step


def train_on_rank(config):
    """The run's steps on this rank -> digests of all weights before and after."""
    recipe = recipes.of_sections(config)
    fix_numerics(threads=1, exact=True)
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    parts = build.assemble(recipe, world, torch.device("cpu"))
    first = parts.digests(is_collective=True)["digest"]
    for micro_batches in parts.steps(0):
        step(parts.state, micro_batches, clip=recipe.optim.clip)
    return first, parts.digests(is_collective=True)["digest"]
