"""Blocks compiled by torch.compile: the bits of a block's outputs depend on the shapes of its inputs, not on those that
a rank met before."""

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.base.errors import ConfigError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
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

    _claim_cache()
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


def _claim_cache() -> None:
    """Refuse code from a folder of another user: its name, in the shared temporary folder, can be guessed."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    if VARIABLE in os.environ or os.name == "nt":  # noqa: TID251 (a variable of torch's)
        return
    folder = Path(default_cache_dir())
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"train.compile: others could write to {folder}, whose code torch.compile would execute: remove it, or "
            f"name another folder with {VARIABLE}"
        )
