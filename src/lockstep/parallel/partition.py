"""Parts of a model's forward pass, from one of its blocks to another: the model's own code runs, unaware, with the
blocks of other parts left out.

B = blocks with weights, in the order in which they run; others, such as a position encoding that all layers use, count
as the model's own code. Unit k is block k with the model's own code on the way to it; what follows the last block goes
with it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import Batch, Model
from lockstep.core.modules.blocks import with_weights
from lockstep.core.modules.buffers import borrowed
from lockstep.core.modules.call_checksums import CallChecksums, first_difference
from lockstep.core.modules.module_trace import descriptions
from lockstep.core.modules.outputs import are_equal
from lockstep.core.numerics.seeds import GeneratorStates, generators, generators_restored, seed_all, set_generators

Run = Callable[[], Any]
CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Travelling:
    """How a tensor goes from one process to another: as it lies in memory, so that it arrives with the same strides."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Its axes by falling stride."""
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Travelling":
        """The way of a tensor like this one."""
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        is_dense = tensor.permute(order).is_contiguous()
        return cls(tuple(tensor.shape), tuple(order) if is_dense else tuple(range(tensor.ndim)), tensor.dtype)

    def packed(self, tensor: Tensor) -> Tensor:
        """Contiguous, without a copy where it is dense."""
        return tensor.permute(self.order).contiguous()

    def unpacked(self, tensor: Tensor) -> Tensor:
        return tensor.permute(tuple(self.order.index(axis) for axis in range(len(self.order))))

    def room(self, device: torch.device) -> Tensor:
        return torch.empty([self.shape[axis] for axis in self.order], dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Wire:
    """What a block gives, as a list of tensors to be sent."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """A Travelling for each tensor, other values as they are."""

    @classmethod
    def of(cls, number: int, outputs: Any) -> "Wire":
        """The wire for outputs of block `number` like these. Raises ModelError."""
        leaves, spec = pytree.tree_flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise ModelError(
                    f"block {number} gives a {type(leaf).__name__}, which cannot be sent to another process: blocks of "
                    "a pipeline give tensors, or tuples, lists and dicts of them"
                )
        return cls(spec, tuple(Travelling.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    @property
    def tensors(self) -> list[Travelling]:
        """Those that are sent, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Travelling)]

    def packed(self, outputs: Any) -> tuple[Tensor, ...]:
        """A block's outputs as they are sent."""
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        return tuple(way.packed(leaf) for way, leaf in zip(self.tensors, leaves, strict=True))

    def unpacked(self, tensors: Sequence[Tensor]) -> Any:
        arriving = iter(tensors)
        leaves = [leaf.unpacked(next(arriving)) if isinstance(leaf, Travelling) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


class _Reached(BaseException):
    """The last block of a part has run; nothing after it is wanted. No code on the way catches it by mistake."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class Cuttable:
    """A model whose blocks can be left out of a forward pass."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.blocks = with_weights(model.blocks())
        self._visitor: Callable[[int, Run], Any] | None = None
        self._wires: dict[Any, tuple[Wire, ...]] = {}
        self._zeros: dict[torch.dtype, Tensor] = {}
        self.unit_of = {block: number for number, block in enumerate(self.blocks)}
        for block in self.blocks:
            block.forward = partial(self._entered, block, block.forward)

    def arrange(self, batch: Batch) -> None:
        """Find the order in which blocks run. Raises ModelError where they are not entered once each."""
        order: list[int] = []

        def look(number: int, run: Run) -> Any:
            order.append(number)
            return run()

        with self._measured(), self.visited(look):
            self.model(batch)
        if sorted(order) != list(range(len(self.blocks))):
            raise ModelError(
                f"a pipeline cuts between blocks that a forward pass enters once each, but of the {len(self.blocks)} "
                f"blocks with weights it {self._misused(order)}: name others in blocks(), or use parallel.kind=ddp"
            )
        self.blocks = [self.blocks[number] for number in order]
        self.unit_of = {block: number for number, block in enumerate(self.blocks)}

    def _misused(self, order: Sequence[int]) -> str:
        """Which blocks are left out and which are entered several times, by their modules' names."""
        names = {module: name for name, module in self.model.named_modules()}
        times = {names[block]: order.count(number) for number, block in enumerate(self.blocks)}
        out, again = [name for name in times if not times[name]], [name for name in times if times[name] > 1]
        found = [f"leaves out {few(out)}"] * bool(out) + [f"enters {few(again)} more than once"] * bool(again)
        return " and ".join(found)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Inside, forward passes leave nothing behind: in evaluation mode, without gradients, with random numbers of
        their own, the same each time."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), generators_restored(), borrowed(self.model):
                seed_all(0)
                yield
        finally:
            self.model.train(was_training)

    def _entered(self, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        run = partial(forward, *args, **kwargs)
        return run() if self._visitor is None else self._visitor(self.unit_of[block], run)

    @contextmanager
    def visited(self, visitor: Callable[[int, Run], Any]) -> Iterator[None]:
        """Inside, `visitor(number, run)` is called in place of each block, and gives its outputs."""
        self._visitor = visitor
        try:
            yield
        finally:
            self._visitor = None

    def wires(self, batch: Batch) -> tuple[Wire, ...]:
        """What each block gives for batches of this shape; a forward pass for each new shape, whatever the weights."""
        key = tuple((name, column.shape, column.dtype) for name, column in sorted(batch.items()))
        if key not in self._wires:
            found: list[Wire] = []

            def look(number: int, run: Run) -> Any:
                outputs = run()
                found.append(Wire.of(number, outputs))
                return outputs

            with self._measured(), self.visited(look):
                self.model(batch)
            self._wires[key] = tuple(found)
        return self._wires[key]

    def run(
        self,
        first: int,
        last: int,
        *,
        batch: Batch,
        received: Sequence[Tensor],
        states: GeneratorStates | None = None,
    ) -> Any:
        """Run blocks first..last-1 and what lies before each of them.

        `received`: what block first-1 has given, packed, if there is one; `states`: those of the random generators
        after it, from which they go on. Returns the same for block last-1, as a tuple; after the last block of all, the
        model's outputs.
        """
        wires, has_gradient = self.wires(batch), torch.is_grad_enabled()

        def visit(number: int, run: Run) -> Any:
            if number < first - 1:
                return wires[number].unpacked([self._blank(way, received[0]) for way in wires[number].tensors])
            if number == first - 1:
                torch.set_grad_enabled(has_gradient)
                if states is not None:
                    set_generators(states)
                # The model's code may change it in place, which autograd forbids for what has been received.
                return wires[number].unpacked([t.clone() for t in received] if has_gradient else received)
            outputs = run()
            if number == last - 1 and last < len(self.blocks):
                raise _Reached(outputs)
            return outputs

        try:
            with torch.set_grad_enabled(has_gradient and first == 0), self.visited(visit):
                return self.model(batch)
        except _Reached as reached:
            return wires[last - 1].packed(reached.outputs)
        finally:
            torch.set_grad_enabled(has_gradient)

    def check(self, bounds: Sequence[int], batch: Batch) -> None:
        """Raise ModelError where the parts, one after the other, do not give what the whole model gives."""
        outputs, states = (), None
        with self._measured():
            expected = self.model(batch)
        with self._measured():
            for first, last in pairwise(bounds):
                outputs = self.run(first, last, batch=batch, received=outputs, states=states)
                states = generators()
        if not are_equal(outputs, expected):
            self._check_repeats(batch)
            raise ModelError(
                f"cut before blocks {list(bounds[1:-1])}, the model gives other outputs: something that a block gives, "
                "such as a mask or a position, is used by later blocks than the next one. Set parallel.cut to other "
                "places, or use parallel.kind=fsdp"
            )

    def _check_repeats(self, batch: Batch) -> None:
        """Raise ModelError where even the whole model does not give the same outputs again."""
        passes = []
        for _ in range(2):
            with self._measured(), CallChecksums(self.model) as calls:
                self.model({name: column.clone() for name, column in batch.items()})
            passes.append(calls.read())
        if name := first_difference(*passes):
            raise ModelError(
                f"module {descriptions(self.model)[name]} gave other outputs when it was called again with equal "
                "inputs, so that a pipeline's stages would not give what the whole model gives: it draws random "
                "numbers that Lockstep does not seed, or keeps something outside of parameters and buffers"
            )

    def _blank(self, way: Travelling, like: Tensor) -> Tensor:
        """Zeros in the place of what a left-out block would give."""
        size = math.prod(way.shape)
        if size > (self._zeros[way.dtype].numel() if way.dtype in self._zeros else -1):
            self._zeros[way.dtype] = torch.zeros(size, dtype=way.dtype, device=like.device)
        return self._zeros[way.dtype][:size].view([way.shape[axis] for axis in way.order])
