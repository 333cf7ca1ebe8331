"""Runs the blocks of one pipeline stage: the model's own forward, with the blocks of other stages skipped.

Not torch.distributed.pipelining's own splitting, which needs a model that torch.export can trace. B = blocks with
weights, in the order of their calls; others, such as a position encoding that all layers use, count as the model's own
code. Unit k is block k with the model's own code on the way to it; what follows the last block belongs to its unit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import Batch, Model
from lockstep.core.modules.blocks import with_weights
from lockstep.core.modules.buffers import copied_buffers
from lockstep.core.modules.call_checksums import CallChecksums, first_difference
from lockstep.core.modules.module_trace import descriptions
from lockstep.core.modules.outputs import are_equal, tensors
from lockstep.core.numerics.seeds import GeneratorStates, generators, generators_restored, seed_all, set_generators

T = TypeVar("T")
Run = Callable[[], Any]
Intercept = Callable[[int, Run], Any]
"""(number of a block, its forward) -> the block's outputs."""
DIFFERENTIATES = (
    "forward() differentiates by itself (torch.enable_grad, torch.autograd.grad), which a pipeline cannot do, as "
    "several processes run the forward pass: use parallel.kind=ddp or fsdp"
)
CONSTANTS = (type(None), bool, int, float, str)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the axes by falling stride; unsorted where the tensor has gaps or repeats its elements."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))


def in_order(order: tuple[int, ...], tensor: Tensor) -> Tensor:
    """Return the same numbers, laid out with these axes by falling stride."""
    return tensor.permute(order).contiguous().permute(tuple(order.index(axis) for axis in range(len(order))))


@dataclass(frozen=True)
class TensorLayout:
    """Shape, dtype and order of strides of a tensor that is sent between ranks. It is sent with its axes permuted to be
    contiguous, as send and recv need it, and arrives with the same strides."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Axes by falling stride."""
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        return cls(tuple(tensor.shape), order_of(tensor), tensor.dtype)

    @property
    def packed_shape(self) -> list[int]:
        return [self.shape[axis] for axis in self.order]

    def pack(self, tensor: Tensor) -> Tensor:
        """Permute to be contiguous, without a copy where it is dense."""
        return tensor.permute(self.order).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor.permute(tuple(self.order.index(axis) for axis in range(len(self.order))))

    def empty(self, device: torch.device) -> Tensor:
        """Return a packed receive buffer."""
        return torch.empty(self.packed_shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class OutputLayout:
    """Form in which a block's outputs are sent: a list of tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """A TensorLayout for each tensor, other values as they are."""

    @classmethod
    def of(cls, number: int, outputs: Any) -> "OutputLayout":
        """Return the layout of outputs of block `number`. Raises ModelError."""
        leaves, spec = pytree.tree_flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                what = f"block {number} gives a {type(leaf).__name__}, which cannot be sent to another process"
                raise ModelError(f"{what}: blocks of a pipeline give tensors, or tuples, lists and dicts of them")
        return cls(spec, tuple(TensorLayout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    @property
    def tensors(self) -> list[TensorLayout]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorLayout)]

    def pack(self, outputs: Any) -> tuple[Tensor, ...]:
        return tuple(layout.pack(leaf) for layout, leaf in zip(self.tensors, tensors(outputs), strict=True))

    def unpack(self, packed: Sequence[Tensor]) -> Any:
        remaining = iter(packed)
        leaves = [leaf.unpack(next(remaining)) if isinstance(leaf, TensorLayout) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


class _StopForward(BaseException):
    """Ends a forward pass after a stage's last block. A BaseException, so that the model's code does not catch it."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class PartitionedModel:
    """A model whose blocks can be skipped in a forward pass."""

    def __init__(self, model: Model) -> None:
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # its layers would give each other tensors without a shape
        self.blocks = with_weights(model.blocks())
        self._intercept: Intercept | None = None
        self._layouts: dict[Any, tuple[OutputLayout, ...]] = {}
        self._zeros: dict[torch.dtype, Tensor] = {}
        self.gradient_orders: dict[tuple[int, int], tuple[int, ...]] = {}
        """(number of a block, of one of its outputs) -> order of the gradient's axes, as the next block gives it."""
        self.unit_of = {block: number for number, block in enumerate(self.blocks)}
        for block in self.blocks:
            block.forward = partial(self._forward, block, block.forward)

    def _forward(self, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        run = partial(forward, *args, **kwargs)
        return run() if self._intercept is None else self._intercept(self.unit_of[block], run)

    @contextmanager
    def intercepted(self, intercept: Intercept) -> Iterator[None]:
        """Call `intercept(number, run)` in place of each block inside the context; it returns the block's outputs."""
        self._intercept = intercept
        try:
            yield
        finally:
            self._intercept = None

    @contextmanager
    def in_turn(self, intercept: Intercept) -> Iterator[None]:
        """Intercept like `intercepted`. Raises ModelError for a pass that skips blocks, as with stochastic depth."""
        entered = 0

        def checked(number: int, run: Run) -> Any:
            nonlocal entered
            if number != entered:
                raise ModelError(self._left_out(entered))
            entered += 1
            return intercept(number, run)

        with self.intercepted(checked):
            yield
        if entered < len(self.blocks):
            raise ModelError(self._left_out(entered))

    def _left_out(self, number: int) -> str:
        name = next(name for name, module in self.model.named_modules() if module is self.blocks[number])
        what = f"a forward pass of training has left out {name}, as with stochastic depth or layer drop"
        why = "and a pipeline's stages are blocks that each one enters once"
        advice = "use parallel.kind=ddp with parallel.find_unused=true, or multiply what the block adds by 0 instead"
        return f"{what}, {why}: {advice}"

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Run forward passes without effects: in evaluation mode, without gradients, with the same random numbers."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), generators_restored(), copied_buffers(self.model):
                seed_all(0)
                yield
        finally:
            self.model.train(was_training)

    def _map_blocks(self, batch: Batch, function: Callable[[int, Any], T]) -> list[T]:
        """Return `function(number, outputs)` of each block, in the order of their calls."""
        results: list[T] = []

        def record(number: int, run: Run) -> Any:
            if torch.is_grad_enabled():
                raise ModelError(DIFFERENTIATES)
            outputs = run()
            results.append(function(number, outputs))
            return outputs

        with self._trial(), self.intercepted(record):
            self.model(batch)
        return results

    def order_blocks(self, batch: Batch) -> None:
        """Sort the blocks by the order of their calls. Raises ModelError where they are not called once each, and for
        hooks that need the gradient of a block's inputs, which another stage has."""
        named = self.model.named_modules()
        if hooked := [name for name, module in named if module in self.unit_of and module._backward_hooks]:
            what = f"a pipeline may cut behind {few(hooked)}, whose hook for backward passes"
            why = "(register_full_backward_hook) would not have the gradient of its inputs there"
            raise ModelError(f"{what} {why}: use parallel.kind=ddp or fsdp")
        order = self._map_blocks(batch, lambda number, _: number)
        if sorted(order) != list(range(len(self.blocks))):
            raise ModelError(
                f"a pipeline cuts between blocks that a forward pass enters once each, but of the {len(self.blocks)} "
                f"blocks with weights it {self._miscalled(order)}: name others in blocks(), or use parallel.kind=ddp"
            )
        self.blocks = [self.blocks[number] for number in order]
        self.unit_of = {block: number for number, block in enumerate(self.blocks)}

    def _miscalled(self, order: Sequence[int]) -> str:
        """Return which blocks are not called and which are called several times, by their modules' names."""
        names = {module: name for name, module in self.model.named_modules()}
        times = {names[block]: order.count(number) for number, block in enumerate(self.blocks)}
        out, again = [name for name in times if not times[name]], [name for name in times if times[name] > 1]
        texts = [f"leaves out {few(out)}"] * bool(out) + [f"enters {few(again)} more than once"] * bool(again)
        return " and ".join(texts)

    def output_layouts(self, batch: Batch) -> tuple[OutputLayout, ...]:
        """Return the layouts of all blocks' outputs for batches of this shape; a new shape runs a forward pass."""
        key = tuple((name, column.shape, column.dtype) for name, column in sorted(batch.items()))
        if key not in self._layouts:
            self._layouts[key] = tuple(self._map_blocks(batch, OutputLayout.of))
        return self._layouts[key]

    def run(
        self, first: int, last: int, *, batch: Batch, received: Sequence[Tensor], states: GeneratorStates | None = None
    ) -> Any:
        """Run blocks first..last-1 and the code before each of them.

        `received`: the packed outputs of block first-1, if there is one; `states`: of the random generators after it.
        Returns the packed outputs of block last-1 as a tuple, or the model's outputs after the last block of all.
        """
        layouts, has_gradient = self.output_layouts(batch), torch.is_grad_enabled()

        def skip_or_run(number: int, run: Run) -> Any:
            if number < first - 1:
                return layouts[number].unpack([self._zero(tensor, received[0]) for tensor in layouts[number].tensors])
            if number == first - 1:
                torch.set_grad_enabled(has_gradient)
                if states is not None:
                    set_generators(states)
                # Cloned, because the model may change it in place, which autograd forbids for leaves.
                return layouts[number].unpack([t.clone() for t in received] if has_gradient else received)
            outputs = run()
            if number == last - 1 and last < len(self.blocks):
                raise _StopForward(outputs)
            return outputs

        try:
            with torch.set_grad_enabled(has_gradient and first == 0), self.in_turn(skip_or_run):
                return self.model(batch)
        except _StopForward as stop:
            self._keep_gradient_orders(last - 1, stop.outputs)
            return layouts[last - 1].pack(stop.outputs)
        finally:
            torch.set_grad_enabled(has_gradient)

    def _keep_gradient_orders(self, block: int, outputs: Any) -> None:
        """Bring gradients, received in the order of the outputs' axes, into the order that they have without a cut: the
        kernels of the backward pass, and so its bits, depend on it."""
        for number, tensor in enumerate(tensors(outputs)):
            order = self.gradient_orders.get((block, number))
            if order is not None and tensor.requires_grad:
                tensor.register_hook(partial(in_order, order))

    def _zero(self, layout: TensorLayout, like: Tensor) -> Tensor:
        """Return zeros in place of an output of a skipped block; new ones where the model has written into the last."""
        size, zeros = math.prod(layout.shape), self._zeros.get(layout.dtype)
        if zeros is None or zeros.numel() < size or zeros._version:
            with torch.inference_mode(mode=False):  # tensors of that mode have no versions
                zeros = self._zeros[layout.dtype] = torch.zeros(size, dtype=layout.dtype, device=like.device)
        return zeros[:size].view(layout.packed_shape)

    def check(self, bounds: Sequence[int], batch: Batch) -> None:
        """Raise ModelError where the stages, one after the other, do not give the whole model's outputs."""
        outputs, states = (), None
        with self._trial():
            expected = self.model(batch)
        with self._trial():
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
        """Raise ModelError where even the whole model does not give the same outputs twice."""
        passes = []
        for _ in range(2):
            with self._trial(), CallChecksums(self.model) as calls:
                self.model({name: column.clone() for name, column in batch.items()})
            passes.append(calls.read())
        if name := first_difference(*passes):
            raise ModelError(
                f"module {descriptions(self.model)[name]} gave other outputs when it was called again with equal "
                "inputs, so that a pipeline's stages would not give what the whole model gives: it draws random "
                "numbers that Lockstep does not seed, or keeps something outside of parameters and buffers"
            )
