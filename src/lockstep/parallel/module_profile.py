"""Profiles a model for pipeline partitioning: the parameters, inputs and time of each unit, from one training pass.

B = blocks; units as in partition.py.
"""

import time
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch
from lockstep.core.host.stream_clock import synchronize
from lockstep.core.modules.buffers import copied_buffers
from lockstep.core.modules.outputs import graph_leaves, widened
from lockstep.core.numerics.loss import unweighted, with_gradient
from lockstep.parallel.micro_batches import refuse_weights_in_loss
from lockstep.parallel.partition import PartitionedModel, Run, in_order, order_of


@dataclass(frozen=True)
class ModuleProfile:
    holders: dict[str, tuple[int, int]]
    """Parameter -> the first and the last unit that uses it."""
    modules: dict[str, int]
    """Module -> the unit that runs it."""
    skips: list[tuple[int, int]]
    """(block, unit): the unit uses outputs of the block, with others between them."""
    seconds: list[float]
    """Forward and backward pass of each unit."""

    def obstacles(self) -> dict[int, str]:
        """Return number of a unit, 1..B-1 -> why the model cannot be cut before it."""
        obstacles = {}
        for name, (first, last) in self.holders.items():
            reason = f"{name} is used in blocks {first} and {last} alike (tied weights)"
            obstacles.update(dict.fromkeys(range(first + 1, last + 1), reason))
        for block, unit in self.skips:
            reason = f"block {unit} uses what block {block} gives, past those between them"
            obstacles.update(dict.fromkeys(range(block + 2, unit + 1), reason))
        return obstacles


def profile_modules(partitioned: PartitionedModel, batch: Batch, autocast: Callable[[], Any]) -> ModuleProfile:
    """Run a model's forward and backward unit by unit. Weights and buffers do not change. Raises ModelError."""
    frozen = [p for p in partitioned.model.parameters() if p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        with autocast():
            partitioned.order_blocks(batch)
        with copied_buffers(partitioned.model):
            _ProfiledPass(partitioned, batch, autocast)  # warm-up
        with copied_buffers(partitioned.model):
            refuse_state_between_blocks(partitioned, batch, autocast)
        partitioned.gradient_orders.clear()
        with copied_buffers(partitioned.model):
            return _ProfiledPass(partitioned, batch, autocast).profile()
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


def refuse_state_between_blocks(partitioned: PartitionedModel, batch: Batch, autocast: Callable[[], Any]) -> None:
    """Raise ModelError where a forward pass changes a buffer outside of all blocks, which several stages run."""
    inside = {module for block in partitioned.blocks for module in block.modules()}
    outside = {name: m for name, m in partitioned.model.named_modules() if m not in inside}
    before = {(n, key): (t, t.clone()) for n, m in outside.items() for key, t in m._buffers.items() if t is not None}
    if not before:
        return
    with torch.no_grad(), torch.random.fork_rng(), autocast():
        partitioned.model(batch)
    for (name, key), (tensor, value) in before.items():
        now = outside[name]._buffers[key]
        if now is not tensor or not torch.equal(tensor, value):
            raise ModelError(
                f"the buffer {name}.{key} changes in code outside of the model's blocks, which several stages of a "
                "pipeline run: move it into a block, or use parallel.kind=ddp or fsdp"
            )


class OutputUses(TorchDispatchMode):
    """Records the units that use outputs of another block than the one before them, even those without a gradient, such
    as masks and positions."""

    def __init__(self, unit: Callable[[], int]) -> None:
        super().__init__()
        self.unit, self.block_of_storage, self.skips = unit, dict[int, int](), set[tuple[int, int]]()
        self.kept: list[Tensor] = []
        """Outputs, kept alive so that no other tensor gets the address of one."""

    def add(self, block: int, tensors: Sequence[Tensor]) -> None:
        """Add the outputs of a block, each in its own storage."""
        self.kept += tensors
        self.block_of_storage |= {tensor.untyped_storage()._cdata: block for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                block = self.block_of_storage.get(leaf.untyped_storage()._cdata)
                if block is not None and block < self.unit() - 1:
                    self.skips.add((block, self.unit()))
        return func(*args, **(kwargs or {}))


class _ProfiledPass:
    """One forward and backward pass with the autograd graph cut after every block."""

    def __init__(self, partitioned: PartitionedModel, batch: Batch, autocast: Callable[[], Any]) -> None:
        self.model, self.count = partitioned.model, len(partitioned.blocks)
        self.gradient_orders = partitioned.gradient_orders
        self.ends: list[tuple[list[Tensor], list[Tensor]]] = []
        """Unit -> its outputs that require a gradient, and the leaves that replace them for the next; last the loss."""
        self.outputs: list[list[tuple[int, int]]] = []
        """Unit -> for each of its leaves the numbers of the unit, and of the output that it replaces."""
        self.entered: dict[nn.Module, int] = {}
        self.device = next(partitioned.model.parameters()).device
        self.times = [self._now()]
        handle = register_module_forward_pre_hook(self._enter)
        self.uses = OutputUses(lambda: len(self.ends))
        try:
            with partitioned.in_turn(self._run_block), autocast(), self.uses:
                outputs = self.model(batch)
            refuse_weights_in_loss(self.model, outputs, batch)
            loss = with_gradient(unweighted(self.model.loss(widened(outputs), batch)), outputs).total
        finally:
            handle.remove()
        self.times.append(self._now())
        self.ends.append(([loss], []))
        self.outputs.append([])
        self.reached = [graph_leaves(tensors) for tensors, _ in self.ends]  # parameters, and outputs of other units
        self.backward = [self._backward(unit) for unit in reversed(range(self.count + 1))][::-1]

    def _now(self) -> float:
        """Return the time after the device has finished its work."""
        synchronize(self.device)
        return time.perf_counter()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.entered.setdefault(module, len(self.ends))

    def _run_block(self, _: int, run: Run) -> Any:
        outputs = run()
        if any(map(_is_packed, pytree.tree_leaves(outputs, is_leaf=_is_packed))):
            raise ModelError(
                f"block {len(self.ends)} gives a PackedSequence, whose shapes depend on the samples: a pipeline cannot "
                "hand it over; pack and pad inside of one block, or use parallel.kind=ddp or fsdp"
            )
        leaves, spec = pytree.tree_flatten(outputs)
        with_gradient = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        detached = {id(leaf): leaf.detach().requires_grad_() for leaf in with_gradient}
        cloned = [detached.get(id(leaf), leaf).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for number, tensor in enumerate(leaf for leaf in cloned if isinstance(leaf, Tensor)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note_order, (len(self.ends), number)))
        numbers = {id(leaf): number for number, leaf in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor))}
        self.outputs.append([(len(self.ends), numbers[leaf]) for leaf in detached])
        self.uses.add(len(self.ends), [leaf for leaf in cloned if isinstance(leaf, Tensor)])
        self.ends.append((with_gradient, list(detached.values())))
        self.times.append(self._now())
        return pytree.tree_unflatten(cloned, spec)

    def _note_order(self, output: tuple[int, int], gradient: Tensor) -> None:
        """Keep the axis order of an output's gradient, of several units the last one's: autograd adds the others."""
        self.gradient_orders.setdefault(output, order_of(gradient))

    def _backward(self, unit: int) -> float:
        """Return the seconds of a unit's backward pass, after those of all later units."""
        outputs, detached = self.ends[unit]
        gradients = [
            torch.zeros_like(t) if t.grad is None else in_order(self.gradient_orders[output], t.grad)
            for t, output in zip(detached, self.outputs[unit], strict=True)
        ]
        if unit == self.count:
            gradients = [torch.ones_like(t) for t in outputs]
        start = self._now()
        if outputs:
            torch.autograd.backward(outputs, gradients, retain_graph=True)  # several units may share nodes of the graph
        seconds = self._now() - start
        for parameter in self.model.parameters():
            parameter.grad = None
        return seconds

    def profile(self) -> ModuleProfile:
        last = self.count - 1
        block_of = {leaf: number for number, (_, detached) in enumerate(self.ends) for leaf in detached}
        skips = [
            (block_of[leaf], min(unit, last))
            for unit, leaves in enumerate(self.reached)
            for leaf in leaves
            if leaf in block_of and block_of[leaf] < unit - 1
        ]
        skips += [(block, min(unit, last)) for block, unit in sorted(self.uses.skips)]
        modules = dict[str, int]()
        for name, module in self.model.named_modules():  # one that is not called belongs to the one around it
            around = modules.get(name.rpartition(".")[0], last) if name else last
            modules[name] = min(self.entered.get(module, around), last)
        holders = {}
        for name, parameter in self.model.named_parameters():
            units = [min(unit, last) for unit, leaves in enumerate(self.reached) if parameter in leaves]
            unused = modules[name.rpartition(".")[0]]
            holders[name] = (min(units, default=unused), max(units, default=unused))
        forward = [after - before for before, after in pairwise(self.times)]
        seconds = [sum(pair) for pair in zip(forward, self.backward, strict=True)]
        return ModuleProfile(holders, modules, skips, [*seconds[:last], seconds[last] + seconds[self.count]])


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)


def balanced_bounds(
    costs: Sequence[float], stages: int, *, obstacles: Container[int], trained: Set[int]
) -> list[int] | None:
    """Partition costs into contiguous stages, the largest sum minimal, by dynamic programming: [0, ..., len(costs)].

    No stage starts at one of the `obstacles`, and each has some of `trained`. None when there is no solution.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # end of the stages so far -> (largest sum, bounds)
    for number in range(1, stages + 1):
        ends = [len(costs)] if number == stages else range(1, len(costs))
        candidates = {
            end: [
                (max(largest, sum(costs[start:end])), [*bounds, end])
                for start, (largest, bounds) in best.items()
                if start < end and start not in obstacles and not trained.isdisjoint(range(start, end))
            ]
            for end in ends
        }
        best = {end: min(options) for end, options in candidates.items() if options}
    return best[len(costs)][1] if len(costs) in best else None
