"""Where a model can be cut: what each of its units holds, needs and costs, found by running it once.

B = blocks; units as in cut.py.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from lockstep.core.modules.buffers import borrowed
from lockstep.core.modules.outputs import widened
from lockstep.core.numerics.loss import unweighted
from lockstep.parallel.micro_batches import refuse_weights_in_loss
from lockstep.parallel.partition import Cuttable, Run


@dataclass(frozen=True)
class ModuleProfile:
    """What was found of a model of B units."""

    holders: dict[str, tuple[int, int]]
    """Parameter -> the first and the last unit that uses it."""
    modules: dict[str, int]
    """Module -> the unit in which it runs."""
    skips: list[tuple[int, int]]
    """(block, unit): the unit uses what the block gives, though others lie between them."""
    seconds: list[float]
    """Forward and backward pass of each unit."""

    def obstacles(self) -> dict[int, str]:
        """Place of a cut (before unit 1..B-1) -> why it cannot be there."""
        found = {}
        for name, (first, last) in self.holders.items():
            what = f"{name} is used in blocks {first} and {last} alike (tied weights)"
            found.update(dict.fromkeys(range(first + 1, last + 1), what))
        for block, unit in self.skips:
            what = f"block {unit} uses what block {block} gives, past those between them"
            found.update(dict.fromkeys(range(block + 2, unit + 1), what))
        return found


def survey(cut: Cuttable, batch: Batch, autocast: Callable[[], Any]) -> ModuleProfile:
    """Run a model forwards and backwards, unit by unit. Leaves weights and buffers as they were. Raises ModelError."""
    frozen = [p for p in cut.model.parameters() if p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        with autocast():
            cut.arrange(batch)
        with borrowed(cut.model):
            _Passage(cut, batch, autocast)  # the first is slower
        with borrowed(cut.model):
            refuse_state_between_blocks(cut, batch, autocast)
        with borrowed(cut.model):
            return _Passage(cut, batch, autocast).survey()
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


def refuse_state_between_blocks(cut: Cuttable, batch: Batch, autocast: Callable[[], Any]) -> None:
    """Raise ModelError where a forward pass changes a buffer outside of all blocks: that code runs on several stages,
    of which most do not see what it computes with."""
    inside = {module for block in cut.blocks for module in block.modules()}
    outside = {name: m for name, m in cut.model.named_modules() if m not in inside}
    before = {(n, key): (t, t.clone()) for n, m in outside.items() for key, t in m._buffers.items() if t is not None}
    if not before:
        return
    with torch.no_grad(), torch.random.fork_rng(), autocast():
        cut.model(batch)
    for (name, key), (tensor, value) in before.items():
        now = outside[name]._buffers[key]
        if now is not tensor or not torch.equal(tensor, value):
            raise ModelError(
                f"the buffer {name}.{key} changes in code outside of the model's blocks, which several stages of a "
                "pipeline run: move it into a block, or use parallel.kind=ddp or fsdp"
            )


class Uses(TorchDispatchMode):
    """Sees which units use what a block before the one before them has given: also masks and positions, through which
    no gradient goes."""

    def __init__(self, unit: Callable[[], int]) -> None:
        super().__init__()
        self.unit, self.given, self.skips = unit, dict[int, int](), set[tuple[int, int]]()
        self.kept: list[Tensor] = []
        """So that nothing else gets their memory."""

    def watch(self, block: int, tensors: Sequence[Tensor]) -> None:
        """A block has given these, each in memory of its own."""
        self.kept += tensors
        self.given |= {tensor.untyped_storage()._cdata: block for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        """Look at the tensors that an operation takes."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                block = self.given.get(leaf.untyped_storage()._cdata)
                if block is not None and block < self.unit() - 1:
                    self.skips.add((block, self.unit()))
        return func(*args, **(kwargs or {}))


class _Passage:
    """One forward and backward pass, taken apart at every block."""

    def __init__(self, cut: Cuttable, batch: Batch, autocast: Callable[[], Any]) -> None:
        self.cut, self.count = cut, len(cut.blocks)
        self.ends: list[tuple[list[Tensor], list[Tensor]]] = []
        """Unit -> what it gives, and what the next one takes in its place; last of all the loss."""
        self.entered: dict[nn.Module, int] = {}
        self.marks = [time.perf_counter()]
        handle = register_module_forward_pre_hook(self._enter)
        self.uses = Uses(lambda: len(self.ends))
        try:
            with cut.visited(self._visit), autocast(), self.uses:
                outputs = cut.model(batch)
            refuse_weights_in_loss(cut.model, outputs, batch)
            loss = unweighted(cut.model.loss(widened(outputs), batch)).total
        finally:
            handle.remove()
        self.marks.append(time.perf_counter())
        self.ends.append(([loss], []))
        self.reached = [self._reached(tensors) for tensors, _ in self.ends]
        self.backward = [self._backward(unit) for unit in reversed(range(self.count + 1))][::-1]

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.entered.setdefault(module, len(self.ends))

    def _visit(self, _: int, run: Run) -> Any:
        outputs = run()
        if any(map(_is_packed, pytree.tree_leaves(outputs, is_leaf=_is_packed))):
            raise ModelError(
                f"block {len(self.ends)} gives a PackedSequence, whose shapes depend on the samples: a pipeline cannot "
                "hand it over; pack and pad inside of one block, or use parallel.kind=ddp or fsdp"
            )
        leaves, spec = pytree.tree_flatten(outputs)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        taken = {id(leaf): leaf.detach().requires_grad_() for leaf in given}
        handed = [taken.get(id(leaf), leaf).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.uses.watch(len(self.ends), [leaf for leaf in handed if isinstance(leaf, Tensor)])
        self.ends.append((given, list(taken.values())))
        self.marks.append(time.perf_counter())
        return pytree.tree_unflatten(handed, spec)

    def _reached(self, tensors: Sequence[Tensor]) -> set[Tensor]:
        """The parameters, and what was taken from other units, that tensors were made of."""
        found: set[Tensor] = set()
        open_nodes, seen = [t.grad_fn for t in tensors if t.grad_fn is not None], set()
        while open_nodes:
            node = open_nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(node.variable)
            open_nodes += [following for following, _ in node.next_functions if following is not None]
        return found

    def _backward(self, unit: int) -> float:
        """Seconds of a unit's backward pass, given that of all that follow it."""
        given, _ = self.ends[unit]
        gradients = [torch.ones_like(t) for t in given]
        if unit < self.count:
            taken = self.ends[unit][1]
            gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in taken]
        start = time.perf_counter()
        if given:
            # Code between blocks may serve several of them.
            torch.autograd.backward(given, gradients, retain_graph=True)
        seconds = time.perf_counter() - start
        for parameter in self.cut.model.parameters():
            parameter.grad = None
        return seconds

    def survey(self) -> ModuleProfile:
        last = self.count - 1
        block_of = {leaf: number for number, (_, taken) in enumerate(self.ends) for leaf in taken}
        skips = [
            (block_of[leaf], min(unit, last))
            for unit, leaves in enumerate(self.reached)
            for leaf in leaves
            if leaf in block_of and block_of[leaf] < unit - 1
        ]
        skips += [(block, min(unit, last)) for block, unit in sorted(self.uses.skips)]
        modules = {name: min(self.entered.get(m, last), last) for name, m in self.cut.model.named_modules()}
        holders = {}
        for name, parameter in self.cut.model.named_parameters():
            units = [min(unit, last) for unit, leaves in enumerate(self.reached) if parameter in leaves]
            alone = modules[name.rpartition(".")[0]]
            holders[name] = (min(units, default=alone), max(units, default=alone))
        forward = [after - before for before, after in pairwise(self.marks)]
        seconds = [there + back for there, back in zip(forward, self.backward, strict=True)]
        return ModuleProfile(holders, modules, skips, [*seconds[:last], seconds[last] + seconds[self.count]])


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)


def balanced(costs: Sequence[float], parts: int, possible: Callable[[int, int], bool]) -> list[int] | None:
    """Where to cut a row of costs into so many runs that the dearest is as cheap as can be: [0, ..., len(costs)].

    `possible(start, end)`: whether costs[start:end] may be a run. None when there is no way.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # end of the runs so far -> (their dearest, cuts)
    for number in range(1, parts + 1):
        ends = [len(costs)] if number == parts else range(1, len(costs))
        ways = {
            end: [
                (max(dearest, sum(costs[start:end])), [*cuts, end])
                for start, (dearest, cuts) in best.items()
                if start < end and possible(start, end)
            ]
            for end in ends
        }
        best = {end: min(found) for end, found in ways.items() if found}
    return best[len(costs)][1] if len(costs) in best else None
