"""Make fused CPU optimizers independent of how tensors are sharded."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LANES = 32
"""Two-byte numbers in the widest vector register (AVX-512); a multiple of the lanes of any other type or CPU."""
STEP = "step"
"""Key of the optimizers' step counter, which has the same shape as a scalar parameter."""


class FusedTails:
    """Hooks that recompute the tail of every tensor, the elements that do not fill a vector register.

    The fused CPU kernels process full registers with vector instructions and the tail with scalar ones, which may round
    differently (AdamW and SGD of torch 2.13: 2 of 10,000 elements). The bits would depend on where a shard ends, and so
    on the number of processes. A second optimizer of the same class therefore updates each tail again, padded with
    zeros to a full register. The unfused AdamW rounds consistently, but takes 6 times as long.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [
            {**group, "params": [torch.nn.Parameter(p.new_zeros(LANES)) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        registers = [q for group in groups for q in group["params"]]
        self.pairs = [(p, q) for p, q in zip(originals, registers, strict=True) if p.numel() % LANES]
        self.tail_optimizer: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
        self.updated: list[tuple[Tensor, Tensor]] = []
        """(tail, register with its new values) of the current step."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        """Copy the tails into registers and update them, before the optimizer's own step."""
        self.updated = []
        for own_group, group in zip(self.tail_optimizer.param_groups, optimizer.param_groups, strict=True):
            own_group["lr"] = group["lr"]
        for parameter, register in self.pairs:
            state = optimizer.state.get(parameter)
            register.grad = None
            if parameter.grad is None or not state:  # the first step, without effect, creates the state
                continue
            register.grad = torch.zeros_like(register)
            register_state = self.tail_optimizer.state[register]
            tensors = [(parameter, register), (parameter.grad, register.grad)]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and key != STEP:
                    tensors.append((value, register_state.setdefault(key, torch.zeros_like(register))))
                else:
                    register_state[key] = value.clone() if isinstance(value, Tensor) else value
            pairs = [(_tail(whole), padded.detach()[: parameter.numel() % LANES]) for whole, padded in tensors]
            torch._foreach_copy_([padded for _, padded in pairs], [tail for tail, _ in pairs])
            self.updated += [pairs[0], *pairs[2:]]
        for name in ("grad_scale", "found_inf"):  # set by a gradient scaler for this step
            setattr(self.tail_optimizer, name, getattr(optimizer, name, None))
        self.tail_optimizer.step()

    def _after(self, *_: Any) -> None:
        """Overwrite the tails with the updated registers."""
        if self.updated:
            torch._foreach_copy_([tail for tail, _ in self.updated], [padded for _, padded in self.updated])


def _tail(tensor: Tensor) -> Tensor:
    """View of the last elements of a dense tensor, in memory order, that do not fill a register."""
    size = tensor.numel() % LANES
    return tensor.detach().as_strided((size,), (1,), tensor.storage_offset() + tensor.numel() - size)
