"""Blocks compiled by torch.compile: the bits of a block's outputs depend on the shapes of its inputs, not on those that
a rank met before."""

import shutil
from collections.abc import Callable
from typing import Any

import torch

from lockstep.base.errors import ConfigError

MANY_SHAPES = 1 << 20
"""How often a block may be compiled; above its limit, torch would run the block without compiling it."""


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass that is compiled at its first call with inputs of new shapes.

    Each shape by itself: code for changing shapes is made for the shapes that a rank met first.
    """
    return torch.compile(forward, dynamic=False)


def prepare_compiler(device: torch.device, *, exact: bool) -> None:
    """Set what changes bits: no choice between kernels by their speed, no split of graphs at DDP's buckets.

    Raises ConfigError where there is no compiler.
    """
    from torch._dynamo import config as dynamo  # noqa: PLC0415 (takes a second)
    from torch._inductor import config as inductor  # noqa: PLC0415
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415

    dynamo.automatic_dynamic_shapes, dynamo.optimize_ddp = False, False
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = MANY_SHAPES
    inductor.deterministic = exact
    try:
        found = shutil.which(get_cpp_compiler())
    except (RuntimeError, OSError):
        found = None
    if found is None and device.type == "cpu":
        raise ConfigError(
            "train.compile: on a CPU torch.compile needs a C++ compiler; install g++ (Debian: apt-get install g++), or "
            "set train.compile=false"
        )
