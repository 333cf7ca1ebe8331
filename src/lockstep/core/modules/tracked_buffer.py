"""A buffer of a module, and its value at the start of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lockstep.core.modules.buffer_rules import BufferEvidence, must_declare, rule_of
from lockstep.core.modules.module_trace import class_of


class TrackedBuffer:
    """A buffer of a module, with its value at the start of the step.

    `tensor` is the model's own; within a step `current` may take its place in the module. `version` is autograd's
    version counter of `current` at the last check. `is_silent`: whether it is written to without advancing that
    counter, as by F.batch_norm, .data or NumPy, and so has to be compared by value. PyTorch's own BatchNorm counts its
    batches together with its statistics.
    """

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        tensor = module._buffers[key]
        assert tensor is not None
        self.name, self.module, self.key = name, module, key
        is_of_torch = class_of(module).__module__.startswith("torch.nn.")
        has_count = module._buffers.get("num_batches_tracked") is not None
        self.counts = is_of_torch and has_count and isinstance(module, _BatchNorm)
        self.is_silent = is_of_torch and isinstance(module, _NormBase) and not self.counts
        self.rule, is_checked = rule_of(module, key, tensor)
        self.evidence = BufferEvidence(self.rule) if is_checked else None
        self.adopt(tensor)

    @property
    def value(self) -> Tensor | None:
        """Tensor that the module holds now."""
        return self.module._buffers.get(self.key)

    @property
    def is_summed(self) -> bool:
        """Whether its value after a step combines those of all shards."""
        return self.rule not in ("in_order", "frozen")

    @property
    def is_saved(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set

    @property
    def is_written(self) -> bool:
        """Whether it was written to, or replaced, since the last check."""
        if not self.is_summed:
            return True
        if self.value is not self.current or self._version != self.version:
            return True
        return self.is_silent and self.differs

    @property
    def _version(self) -> tuple[int, int]:
        batches = self.module._buffers.get("num_batches_tracked") if self.counts else None
        return self.current._version, 0 if batches is None else batches._version

    @property
    def differs(self) -> bool:
        """Whether its value differs from that at the start of the step."""
        value = self.value
        return value is not None and self.has_kept_shape and not torch.equal(value, self.before)

    @property
    def has_kept_shape(self) -> bool:
        value = self.value
        return value is not None and (value.shape, value.dtype) == (self.before.shape, self.before.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        is_float = self.before.is_floating_point() or self.before.is_complex()
        return self.before.dtype if is_float else torch.int64

    def adopt(self, tensor: Tensor) -> None:
        """Take a tensor that the module holds as the model's own, and its value as that of the step's start."""
        self.tensor, self.before = tensor, tensor.detach().clone()
        self.previous = self.before
        self.install(tensor)

    def install(self, tensor: Tensor) -> None:
        self.module._buffers[self.key] = self.current = tensor
        self.version = self._version

    @property
    def is_reset_in_place(self) -> bool:
        """Whether the value of the step's start may overwrite the current one. Autograd may have saved the current one
        for the backward pass, but the backward pass of BatchNorm in training does not read it."""
        return isinstance(self.module, _BatchNorm) and self.current is self.tensor

    def contribution(self, *, is_changed: bool) -> Tensor:
        """Return the latest shard's contribution to the sum over all shards, flat; it may share the buffer's memory."""
        value = self.value if is_changed else self.before
        assert value is not None
        if self.rule == "any":
            value = value ^ self.before
        elif self.rule == "sum":
            value = value.detach().to(self.sum_dtype) - self.before.to(self.sum_dtype)
        return value.detach().to(self.sum_dtype).flatten()

    def check_fit(self, samples: int) -> None:
        """Raise ModelError where an undeclared rule does not fit what a shard has done to the buffer."""
        if self.evidence is None or self.value is None:
            return
        if why := self.evidence.misfit(self.before, self.value.detach(), samples):
            raise must_declare(self.name, self.module, why)

    def update(self, total: Tensor, is_finite: Tensor) -> None:
        """Compute the value after the step from the sum over its shards (the mean, by the rule "mean"), both flat."""
        total, before = total.view(self.before.shape), self.before
        if self.rule == "steps":
            after = before + 1  # however often recomputation has repeated a forward pass
        elif self.rule == "sum":
            after = (before.to(self.sum_dtype) + total).to(before.dtype)
        elif self.rule == "any":
            after = before ^ (total > 0)
        else:
            after = torch.where(is_finite.all(), total, before)
        self.previous, self.before = before, after


def restore(buffers: Sequence[TrackedBuffer]) -> None:
    """Set the model's own tensors to the values of the step's start, by few operations, which count on a GPU."""
    by_dtype: dict[torch.dtype, list[TrackedBuffer]] = {}
    for buffer in buffers:
        by_dtype.setdefault(buffer.before.dtype, []).append(buffer)
    for same in by_dtype.values():
        torch._foreach_copy_([buffer.tensor.data for buffer in same], [buffer.before for buffer in same])
    for buffer in buffers:
        buffer.install(buffer.tensor)
