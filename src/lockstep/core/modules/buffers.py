"""Buffers that a forward pass changes: running statistics, counters, power iterations, queues.

In training every micro-batch starts from the buffers as they were at the start of the step. After the step a floating
point buffer becomes the mean of what the shards have left behind, summed in the shards' tree, and an integer one
advances by the sum of what each shard has added; a switch changes if any shard has changed it. So they are the same
bits on any number of processes. BatchNorm is one case of it: its own counter counts steps.

V = shards of a step, W = processes.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.base.errors import ModelError
from lockstep.core.distributed.collectives import all_gather_object, all_reduce_max
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum

WATCHED_STEPS = 2
"""In the first steps buffers are compared by value, later by autograd's count of changes, which costs nothing."""
Rule = Literal["mean", "sum", "any", "steps"]


@dataclass(eq=False)
class Slot:
    name: str
    module: nn.Module
    key: str
    tensor: Tensor
    """The one that belongs to the model; within a step another one may stand in its place."""
    rule: Rule
    before: Tensor
    """Its value at the start of the step."""
    current: Tensor
    version: int
    """How often `current` had been changed when it was last looked at."""
    is_silent: bool = False
    """Whether it is compared by value, being written to past autograd's count of changes: through .data or NumPy."""

    @classmethod
    def of(cls, name: str, module: nn.Module, key: str) -> "Slot":
        """The slot of a buffer as it is now."""
        tensor = module._buffers[key]
        assert tensor is not None
        if key == "num_batches_tracked" and isinstance(module, _BatchNorm):
            rule: Rule = "steps"
        elif tensor.dtype == torch.bool:
            rule = "any"
        else:
            rule = "mean" if tensor.is_floating_point() or tensor.is_complex() else "sum"
        return cls(name, module, key, tensor, rule, tensor.detach().clone(), tensor, tensor._version)

    @property
    def found(self) -> Tensor | None:
        return self.module._buffers.get(self.key)

    @property
    def is_touched(self) -> bool:
        """Whether it was written to, or replaced, since it was last looked at."""
        found = self.found
        if found is not self.current or found._version != self.version:
            return True
        return self.is_silent and self.is_other

    @property
    def is_other(self) -> bool:
        """Whether it has another value than at the start of the step."""
        found = self.found
        return found is not None and self.fits and not torch.equal(found, self.before)

    @property
    def fits(self) -> bool:
        """Whether it still has its shape and type."""
        found = self.found
        return found is not None and (found.shape, found.dtype) == (self.before.shape, self.before.dtype)

    def hold(self, tensor: Tensor) -> None:
        """Let the module hold this one."""
        self.module._buffers[self.key] = self.current = tensor
        self.version = tensor._version

    def reset(self) -> None:
        """Go back to the start of the step. A backward pass that is still to come may have saved what the module holds:
        it gets another tensor, but for BatchNorm, whose backward pass in training does not look at it."""
        if isinstance(self.module, _BatchNorm) and self.current is self.tensor:
            self.tensor.data.copy_(self.before)
            self.hold(self.tensor)
        else:
            self.hold(self.before.clone())

    def added(self) -> Tensor:
        """What the shard that has just run brings to the sum over all shards."""
        found = self.found
        assert found is not None
        if self.rule == "mean":
            return found.detach().clone()
        if self.rule == "any":
            return (found != self.before).to(torch.int64)
        return found.detach().to(torch.int64) - self.before.to(torch.int64)

    def nothing_added(self) -> Tensor:
        """What a shard brings that has left it as it was."""
        return self.before.clone() if self.rule == "mean" else torch.zeros_like(self.before, dtype=torch.int64)

    def commit(self, total: Tensor | None, shards: int) -> None:
        """Take the sum over so many shards as the value after the step; None leaves it as it was."""
        value = self.before if total is None else self._after(total.view(self.before.shape), shards)
        with torch.no_grad():
            self.tensor.data.copy_(value)
        self.before.copy_(value)
        self.hold(self.tensor)

    def _after(self, total: Tensor, shards: int) -> Tensor:
        if self.rule == "steps":
            return self.before + 1  # however often a forward pass was repeated to save memory
        if self.rule == "sum":
            return (self.before.to(torch.int64) + total).to(self.before.dtype)
        if self.rule == "any":
            return self.before ^ (total > 0)
        mean = total / shards
        return torch.where(torch.isfinite(mean).all(), mean, self.before)


class BufferUpdates:
    """The buffers of some modules, by name, through steps and their shards.

    SyncBatchNorm's are left alone: they advance as PyTorch advances them, alike on every rank.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = {name: m for name, m in modules.items() if not isinstance(m, nn.SyncBatchNorm)}
        self.slots: dict[str, Slot] = {}
        self.live: dict[str, TreeSum | None] = {}
        """The buffers that steps change, with the sum of what this rank's shards of the present step have left."""
        self.fresh: set[str] = set()
        """Those that have been seen to change for the first time in the present step, on this rank."""
        self.unhandled: dict[str, str] = {}
        """Buffer -> why its value depends on the number of processes."""
        self.steps, self.done = 0, list[int]()
        self.exchange: AllReduce | None = None
        self.is_asked = True
        """Whether ranks tell each other, in every step, that a buffer has changed for the first time: not where all
        change, or there are none. The same on every rank."""
        self._scan()

    def _scan(self) -> None:
        """Find the buffers; some are made in the first forward pass."""
        known = {id(slot.tensor) for slot in self.slots.values()}
        for prefix, module in self.modules.items():
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and name not in self.slots and id(tensor) not in known:
                    self.slots[name] = Slot.of(name, module, key)
                    known.add(id(tensor))

    def start_step(self, exchange: AllReduce) -> None:
        """Remember where the step starts from."""
        if self.steps <= WATCHED_STEPS:
            self._scan()
        self.refresh()
        self.exchange, self.done, self.fresh = exchange, [], set()
        self.live = {name: self._tree() for name in self.live}

    def _tree(self) -> TreeSum:
        exchange = self.exchange
        assert exchange is not None
        return TreeSum(exchange.present, exchange.nodes[exchange.rank])

    def refresh(self) -> None:
        """Take what was changed from outside, such as by reading a checkpoint, as the value it starts from."""
        for slot in self.slots.values():
            if slot.is_touched and slot.name not in self.unhandled and slot.found is not None:
                slot.tensor = slot.current = slot.found
                slot.before, slot.version = slot.found.detach().clone(), slot.found._version

    def reset(self) -> None:
        """Go back to the step's start."""
        for slot in self.slots.values():
            if slot.is_touched and slot.name not in self.unhandled:
                slot.reset()

    def end_shard(self, shard: int) -> None:
        """Keep what the shard has left behind. Raises ModelError."""
        for name, slot in self.slots.items():
            if name in self.unhandled:
                continue
            is_changed = self._is_changed(slot)
            if is_changed and not slot.fits:
                self._give_up(name, slot)
                continue
            if is_changed and name not in self.live:
                self.fresh.add(name)
                self._start(name)
            if name in self.live:
                tree = self.live[name]
                assert tree is not None
                tree.add((shard, 1), slot.added() if is_changed else slot.nothing_added())
        self.done.append(shard)

    def _give_up(self, name: str, slot: Slot) -> None:
        """A buffer with another shape or type cannot be joined. Raises ModelError where other ranks still expect it."""
        if name in self.live and name not in self.fresh:
            raise ModelError(
                f"the buffer {name} has changed its shape or type {_where(slot.module)}, after steps in which it had "
                "kept it: give it one shape from the start, such as that of its largest size"
            )
        self.live.pop(name, None)
        self.unhandled[name] = f"changes its shape or type {_where(slot.module)}"

    def _is_changed(self, slot: Slot) -> bool:
        """Whether a forward pass has changed it; in the first steps, also past autograd."""
        if self.steps < WATCHED_STEPS and not slot.is_touched and slot.is_other:
            slot.is_silent = True
        return slot.is_touched

    def _start(self, name: str) -> None:
        """A buffer changes for the first time: this rank's earlier shards have left it as it was."""
        tree = self.live[name] = self._tree()
        for shard in self.done:
            tree.add((shard, 1), self.slots[name].nothing_added())

    def end_step(self) -> None:
        """Set what the shards of the whole world make of the buffers."""
        self.steps += 1
        exchange = self.exchange
        assert exchange is not None
        if self.is_asked and dist.get_world_size() > 1:
            self._agree(exchange)
        for is_float in (True, False):
            slots = [self.slots[name] for name in sorted(self.live) if (self.slots[name].rule == "mean") == is_float]
            for dtype in sorted({slot.before.dtype for slot in slots}, key=str) if is_float else [torch.int64]:
                self._join(exchange, [slot for slot in slots if not is_float or slot.before.dtype == dtype], dtype)
        self.live = dict.fromkeys(self.live)
        self.exchange = None  # with its process group, which hooks of the model would keep for good
        self._back()

    def _agree(self, exchange: AllReduce) -> None:
        """A buffer that changes on one rank is joined on all. One small collective in every step."""
        flag = torch.tensor([int(bool(self.fresh)), int(len(self.live) < len(self.slots))])
        all_reduce_max(flag)
        is_news, self.is_asked = (bool(each) for each in flag.tolist())
        self.is_asked |= self.steps < WATCHED_STEPS
        if not is_news:
            return
        told = [
            each for each in all_gather_object((self.fresh, self.slots.keys() - self.unhandled), exchange.group) if each
        ]
        everywhere = set.intersection(*(there for _, there in told))
        for name in sorted(set[str]().union(*(fresh for fresh, _ in told))):
            if name not in everywhere:
                self.live.pop(name, None)
                self.unhandled.setdefault(name, "is made, or keeps its shape, on some processes only")
            elif name not in self.live:
                self._start(name)

    def _join(self, exchange: AllReduce, slots: list[Slot], dtype: torch.dtype) -> None:
        if not slots:
            return
        trees = [tree for slot in slots if (tree := self.live[slot.name]) is not None]
        nodes = exchange.nodes[exchange.rank]
        parts = [torch.cat([tree.parts[node].flatten() for tree in trees]) for node in nodes]
        size = sum(slot.before.numel() for slot in slots)
        total = exchange.sum(parts or [torch.empty(size, dtype=dtype, device=slots[0].before.device)])
        for slot, value in zip(slots, total.split([slot.before.numel() for slot in slots]), strict=True):
            slot.commit(value, len(exchange.present))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Whatever runs inside leaves no trace: for evaluation, which every rank does with samples of its own."""
        self.refresh()
        try:
            yield
        finally:
            self._back()

    def _back(self) -> None:
        """What was touched and is not part of a step's result gets the value of its start."""
        for slot in self.slots.values():
            if slot.name not in self.unhandled and self._is_changed(slot):
                slot.commit(None, 1)

    @property
    def notes(self) -> list[str]:
        """Why the weights depend on the number of processes, or on where a run was resumed; one line a buffer."""
        found = [
            f"the buffer {name} {why}, which cannot be joined over the processes"
            for name, why in self.unhandled.items()
        ]
        found += [
            f"the buffer {name} changes in training, but is no part of a checkpoint (persistent=False, "
            f"{_where(self.slots[name].module)}): a resumed run starts from its first value"
            for name in self.live
            if self.slots[name].key in self.slots[name].module._non_persistent_buffers_set
        ]
        return found


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Inside, a model has copies of its buffers: a forward pass on trial leaves no trace."""
    own = [(m, key, tensor) for m in model.modules() for key, tensor in m._buffers.items() if tensor is not None]
    try:
        for module, key, tensor in own:
            module._buffers[key] = tensor.detach().clone()
        yield
    finally:
        for module, key, tensor in own:
            module._buffers[key] = tensor


def _where(module: nn.Module) -> str:
    """The class and line of a module's code."""
    try:
        file, (_, line) = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module))
    except (OSError, TypeError):
        return f"in {type(module).__name__}"
    return f"in {type(module).__name__} ({file}:{line})"
