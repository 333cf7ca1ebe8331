"""Precision of a run: autocast, gradient scaling, and the switches, also the compiler's, that may change bits."""

import os
import shutil
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.contracts import Format
from lockstep.base.errors import ConfigError
from lockstep.core.distributed.collectives import all_reduce_max

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 2.0**16
"""First scale of the gradients in fp16, as in torch.amp.GradScaler."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable of cuBLAS: its workspace, on which the order of additions depends."""
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch: the folder of compiled code."""
MANY_SHAPES = 1 << 20
"""Limit of a block's compilations; above torch's own limit, it would run without being compiled."""


class Scaler(torch.amp.GradScaler):
    """A GradScaler for sharded models: an overflow on one rank counts on all. Not PyTorch's ShardedGradScaler, which
    does not work with fused optimizers in torch 2.13."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
            for found_inf in self._found_inf_per_device(optimizer).values():
                all_reduce_max(found_inf)


class Precision:
    """Autocast to a format, with a gradient scaler for fp16 (bf16 has fp32's range and needs none)."""

    def __init__(self, kind: Format, device: torch.device, *, targets: int = 1) -> None:
        """`targets`: number of targets of a sample, such as its tokens. Losses are sums over them, so the first scale
        is smaller by about that factor; as each overflow only halves it, many steps would be left out at the start."""
        self.kind, self.device = kind, device
        first_scale = FIRST_SCALE / 2 ** (targets - 1).bit_length()
        self.scaler = Scaler(device.type, enabled=kind == "fp16", init_scale=first_scale)

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are scaled, so that an overflow is expected now and then."""
        return self.scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of every forward pass and its loss."""
        return torch.autocast(self.device.type, AUTOCAST.get(self.kind), enabled=self.kind in AUTOCAST)

    def scaled(self, total: Tensor) -> Tensor:
        """Return the loss to call backward() on: scaled where the format needs it."""
        return self.scaler.scale(total)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scaling of the gradients. A collective."""
        self.scaler.scale(torch.zeros((), device=self.device))  # creates the scale on a rank without a loss
        self.scaler.unscale_(optimizer)

    def undo_unscaling(self) -> None:
        """Reset the state of a step that failed after unscaling, so that another one may be unscaled."""
        if self.is_scaled:
            self.scaler._per_optimizer_states.clear()

    def apply(self, optimizer: torch.optim.Optimizer, *, commit: bool = True, is_empty: bool = False) -> None:
        """Run the optimizer's step, unless `commit` is false or scaled gradients overflowed; update the scale.
        `is_empty`: whether there is no gradient at all."""
        if commit or (self.is_scaled and not is_empty):
            self.scaler.step(optimizer)
        if commit or self.is_scaled:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty for formats without one."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.scaler.load_state_dict(state)


def check_format(kind: Format, device: torch.device) -> None:
    """Raise ConfigError where a device cannot train in a format."""
    if kind == "tf32" and device.type == "cpu":
        what = "train.precision=tf32: only GPUs round numbers to TF32 in products, so a CPU would give other weights"
        raise ConfigError(f"{what}; set train.precision=fp32")


def fix_numerics(*, threads: int, exact: bool, precision: Format = "fp32") -> dict[str, Any]:
    """Set the global switches that change bits or speed, before any thread starts -> facts for the run's record.
    Denormals are flushed first, because threads inherit the setting from the thread that starts them."""
    flushed = torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    facts = {"threads": threads, "denormals_flushed": flushed, "torch_version": str(torch.__version__)}
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.benchmark = not exact
        if exact:
            os.environ.setdefault(WORKSPACE, ":4096:8")  # else deterministic products are refused
        torch.use_deterministic_algorithms(exact)
        # Filling each new tensor with NaN takes a kernel for each.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        facts |= {
            "cudnn_version": torch.backends.cudnn.version(),
            "tf32_in_products": torch.backends.cuda.matmul.allow_tf32,
            "tf32_in_cudnn": torch.backends.cudnn.allow_tf32,
            "cublas_workspace": os.environ.get(WORKSPACE),
        }
    return facts


def prepare_compiler(device: torch.device, *, exact: bool) -> None:
    """Set compiler options that change bits: no kernels chosen by speed, no graphs split at DDP's buckets. Raises
    ConfigError where there is no compiler."""
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
        what = "train.compile: on a CPU torch.compile needs a C++ compiler"
        raise ConfigError(f"{what}; install g++ (Debian: apt-get install g++), or set train.compile=false")


def _claim_cache() -> None:
    """Refuse code from a folder of another user: its name, in the shared temporary folder, can be guessed."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    if COMPILED in os.environ or os.name == "nt":  # noqa: TID251 (a variable of torch's)
        return
    folder = Path(default_cache_dir())
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_IWOTH:
        what = f"train.compile: others could write to {folder}, whose code torch.compile would execute"
        raise ConfigError(f"{what}: remove it, or name another folder with {COMPILED}")
