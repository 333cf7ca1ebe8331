"""Rules for the value that several shards leave in a buffer: declared in the model's file, or derived from the buffer's
type, as long as its changes fit it."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.base.errors import ModelError
from lockstep.base.name_patterns import matching
from lockstep.core.modules.module_trace import class_of, origin

Declared = Literal["mean", "sum", "in_order", "frozen"]
"""mean: of the shards' values; sum: of what each has added to the value of the step's start; in_order: each continues
from the value that the previous one has left; frozen: training does not change it."""
Rule = Declared | Literal["any", "steps"]
"""any: a bool is flipped if any shard has flipped it; steps: it counts them."""

ATTRIBUTE = "_lockstep_buffer_rules"
"""Attribute of a module: its buffers' declared rules, by key, because an adapter renames the buffers."""
LOOKS = 3
"""Number of steps in which the rule mean is checked; the others always are: a pointer may wrap around late."""


def declare(model: nn.Module, rules: Mapping[str, str]) -> None:
    """Set the rules of buffers, by patterns of their names as in model.freeze. Raises ModelError, and ConfigError for a
    pattern that matches no buffer."""
    if not isinstance(rules, Mapping):
        raise ModelError(f"buffers() returns a dict {{pattern: rule}}, not a {type(rules).__name__}")
    names = [name for name, _ in model.named_buffers()]
    for pattern, rule in rules.items():
        for name in matching([pattern], names, setting="buffers()", noun="buffer"):
            prefix, _, key = name.rpartition(".")
            owner, dtype = model.get_submodule(prefix), model.get_buffer(name).dtype
            if rule not in get_args(Declared):
                raise ModelError(f"buffers(): {pattern!r} is {rule!r}, not one of {', '.join(get_args(Declared))}")
            has_mean = dtype.is_floating_point or dtype.is_complex
            if (rule == "sum" and dtype == torch.bool) or (rule == "mean" and not has_mean):
                raise ModelError(f"buffers(): {name} has the type {dtype}, which has no {rule}: declare in_order")
            vars(owner).setdefault(ATTRIBUTE, {})[key] = rule


def rule_of(module: nn.Module, key: str, tensor: Tensor) -> tuple[Rule, bool]:
    """Return the rule of a module's buffer, and whether its fit has to be checked. Where one buffer of a module is
    updated in order, so are the others, which usually describe it."""
    declared: dict[str, Declared] = vars(module).get(ATTRIBUTE, {})
    if key in declared:
        return declared[key], False
    if "in_order" in declared.values():
        return "in_order", False
    if key == "num_batches_tracked" and isinstance(module, _BatchNorm):
        return "steps", False
    is_known = isinstance(module, _BatchNorm) or class_of(module).__module__.startswith("torch.nn.")
    if tensor.dtype == torch.bool:
        return "any", not is_known
    is_mean = tensor.is_floating_point() or tensor.is_complex()
    return "mean" if is_mean else "sum", not is_known and not tensor.is_complex()


def must_declare(name: str, module: nn.Module, why: str) -> ModelError:
    """Return the error for a buffer that no rule fits."""
    return ModelError(
        f"the buffer {name} ({origin(module)}) {why}: what the micro-batches of a step leave in it cannot be joined. "
        "Declare it in the model's file (lockstep.Loop: buffers=...), `def buffers(module): return "
        f'{{"{name.removeprefix("network.")}": "in_order"}}`: each micro-batch then goes on from what the one before '
        'it has left, and they run one after the other. Or "mean" (of what they leave), "sum" (of what they add), '
        '"frozen" (nothing changes it)'
    )


class BufferEvidence:
    """Observations of the changes that shards make to a buffer without a declared rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.steps = rule, 0
        """`steps`: number of steps in which it has changed."""
        self.laws: set[tuple[str, Fraction]] | None = None
        """Rates at which it may grow, per batch or per sample; None before it has grown."""
        self.seen: set[str] = set()

    def misfit(self, before: Tensor, after: Tensor, samples: int) -> str | None:
        """Return why the rule does not fit the change by a shard of so many samples; None where it does."""
        if not before.numel():
            return None
        if self.rule == "any":
            flipped = before ^ after
            self.seen |= {str(way) for way in (True, False) if bool((flipped & (after == way)).any())}
            return "is switched on and off" if len(self.seen) > 1 else None
        if self.rule == "sum":
            is_counter = self._counts(after.to(torch.int64) - before.to(torch.int64), samples)
            return None if is_counter else "is an integer that does not count samples or batches"
        if self.steps >= LOOKS:
            return None
        if self._counts(after.double() - before.double(), samples) and self.steps == LOOKS - 1 and self.laws:
            return "counts samples or batches in a floating-point number"
        return self._partial_update(before, after)

    def _counts(self, added: Tensor, samples: int) -> bool:
        """Return whether it grows by one number for each batch, or each sample; True before it has grown at all."""
        total, lowest = torch.stack([added.sum(), added.min()]).tolist()
        if self.laws is None and total == lowest == 0:
            return True
        is_whole = float(total).is_integer() and lowest >= 0
        laws = (
            {("batch", Fraction(int(total))), ("sample", Fraction(int(total), max(samples, 1)))} if is_whole else set()
        )
        self.laws = laws if self.laws is None else self.laws & laws
        return bool(self.laws)

    def _partial_update(self, before: Tensor, after: Tensor) -> str | None:
        """Return why it is no running statistic, all of which changes; None if it is one. Zeros may stay zeros."""
        same, moved = (after == before) | (after.isnan() & before.isnan()), "moved"
        kept = same & (before != 0)
        if bool(same.all()):
            moved = "kept" if bool(kept.any()) else "zero"
        elif any(bool((_slices(same, axis).all(1) & _slices(kept, axis).any(1)).any()) for axis in range(same.ndim)):
            return "is written in some places, and left alone in others"
        self.seen.add(moved)
        return "changes in some micro-batches only" if {"moved", "kept"} <= self.seen else None


def _slices(tensor: Tensor, axis: int) -> Tensor:
    """Return its slices along an axis, flat: [n, ...]."""
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
