"""The number formats of a run: autocast, gradient scaling, and the switches that may change bits."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.contracts import Format
from lockstep.core.distributed.collectives import all_reduce_max

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Scaler(torch.amp.GradScaler):
    """Ranks may hold different parts of a model: all hear that one's gradients have overflowed.

    PyTorch's ShardedGradScaler means the same, but cannot be used with fused optimizers in torch 2.13.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As in PyTorch; every rank has to call it."""
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
            for found in self._found_inf_per_device(optimizer).values():
                all_reduce_max(found)


class Precision:
    """Autocast to a format, with a gradient scaler for fp16 (bf16 has fp32's range and needs none)."""

    def __init__(self, kind: Format, device: torch.device) -> None:
        self.kind, self.device = kind, device
        self.scaler = Scaler(device.type, enabled=kind == "fp16")

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are scaled, and may overflow in the course of things."""
        return self.scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[None]:
        """The context of every forward pass and its loss."""
        return torch.autocast(self.device.type, DTYPES[self.kind], enabled=self.kind != "fp32")

    def scaled(self, total: Tensor) -> Tensor:
        """A sum of losses to go backwards from: scaled up where the format needs it."""
        return self.scaler.scale(total)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scaling of the gradients; they are the true sums afterwards. Every rank has to call it."""
        self.scaler.scale(torch.zeros((), device=self.device))  # a rank that has seen no loss yet has no scale
        self.scaler.unscale_(optimizer)

    def apply(self, optimizer: torch.optim.Optimizer, *, commit: bool = True, is_empty: bool = False) -> None:
        """The optimizer's step, left out without `commit` or where scaled gradients overflowed; adapts the scale.
        `is_empty`: whether there is no gradient at all."""
        if commit or (self.is_scaled and not is_empty):
            self.scaler.step(optimizer)
        if commit or self.is_scaled:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The scaler's numbers; empty for formats without one."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.scaler.load_state_dict(state)


def fix_numerics(*, threads: int, exact: bool) -> dict[str, Any]:
    """Set what changes bits or speed for the whole process, before any thread is started; returns it as recorded.

    Denormals are flushed here, first, because threads inherit the setting from the one that starts them.
    """
    flushed = torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.benchmark = not exact
        torch.use_deterministic_algorithms(exact)
    return {"threads": threads, "denormals_flushed": flushed, "torch_version": str(torch.__version__)}
