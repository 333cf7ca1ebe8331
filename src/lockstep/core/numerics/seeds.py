"""Random seeds that depend on step, shard, block and use, not on the process."""

import hashlib
import random
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from lockstep.base.errors import ModelError

BITS = 16
LEVELS = 1 << BITS
PER_DRAW = 64 // BITS
"""Numbers for dropout on the CPU from each draw of the generator, in a fifth of the time."""
TOLERANCE = 1e-3
"""Largest relative change of a probability, or of its complement, by rounding."""

_kernels: list[torch.library.Library] = []
"""Keeps the kernel of bernoulli_ registered."""


def use_fast_bernoulli() -> None:
    """Replace the CPU kernel of `bernoulli_(p)` in this process: dropout of every kind draws with it.

    PyTorch draws a number for each element, which took 10 % of a pass of MiniLM in bf16. A kernel, because modules,
    functions and PyTorch's own attention all call it.
    """
    if _kernels:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is replaced
        library.impl("bernoulli_.float", fast_bernoulli_, "CPU")
    _kernels.append(library)


def fast_bernoulli_(self: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill with 1 with probability p, else with 0; any shape, in place. p is rounded to a multiple of 2^-16, unless
    that changes p or 1 - p by more than TOLERANCE. Raises RuntimeError for p outside 0..1."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    if p == 1:  # beyond the integers' range
        return self.fill_(1)
    is_coarse = abs(round(p * LEVELS) / LEVELS - p) <= TOLERANCE * min(p, 1 - p)
    numbers = torch.empty(-(-self.numel() // PER_DRAW) if is_coarse else self.numel(), dtype=torch.int64)
    numbers.random_(-(2**63), None, generator=generator)
    drawn = numbers.view(torch.int16)[: self.numel()] if is_coarse else numbers
    levels = LEVELS if is_coarse else 1 << 64
    threshold = round(p * levels) - levels // 2
    if self.is_contiguous():
        torch.lt(drawn, threshold, out=self.view(-1))
    else:
        self.copy_(torch.lt(drawn, threshold).view(self.shape))
    return self


use_fast_bernoulli()  # on import, so that it does not matter what a process has drawn before
Forward = Callable[..., Any]
GeneratorStates = tuple[Tensor, Tensor | None, Any, Any]


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed for numbers and strings; a hash, so different arguments give unrelated seeds."""
    packed = b"".join(p.encode() + b"\0" if isinstance(p, str) else struct.pack("<q", p) for p in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seed torch (CPU and this process's GPU), Python and NumPy: 7 µs, of which 4 are Python's and 2 NumPy's.

    It runs at every block: 2% of the time of a very small micro-batch (the CNN's 16 digits: 2 blocks, 1 ms). Saving and
    restoring generator states would take longer (NumPy's alone 30 µs).
    """
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every device: 156 µs, not 1.4
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def generators() -> GeneratorStates:
    """Return the states of torch's (CPU and this process's GPU), NumPy's and Python's generators: about 10 KB."""
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state() if has_cuda else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def set_generators(states: GeneratorStates) -> None:
    """Restore the states that `generators` returned."""
    cpu, cuda, numpy, python = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    np.random.set_state(numpy)
    random.setstate(python)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states of all generators on exit."""
    states = generators()
    try:
        yield
    finally:
        set_generators(states)


class _Uses:
    """Uses of blocks in the forward pass of a shard: a block that is called again draws other numbers."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.entered: dict[tuple[int, int], int | None] = {}
        """(block, seed on entry) -> use: recomputation starts from the same seed. None if there were several."""

    def begin(self, number: int) -> int:
        """Count a use of a block, or find the one that the backward pass recomputes. Raises ModelError."""
        entry = number, torch.default_generator.initial_seed()
        if torch._C._current_graph_task_id() == -1:  # outside of a backward pass
            use = self.counts[number]
            self.counts[number] += 1
            self.entered[entry] = None if entry in self.entered else use
            return use
        found = self.entered.get(entry) if self.counts[number] > 1 else 0
        if found is None:
            raise ModelError(
                "a block that runs more than once in a forward pass is recomputed in the backward pass, and it is not "
                "known which of its uses: leave out preserve_rng_state=False, and do not seed inside forward()"
            )
        return found


class Randomness:
    """Reseeds from (seed, step, shard, block, use) whenever a block is entered in training, in the forward pass or in
    recomputation, and again when it is left: the code that follows may run on another rank than the block."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.shard = seed, 0, 0
        self.recomputes = False
        self.compiles = False
        self._uses: dict[int, _Uses] = {}
        """Uses by shard of the current step, of which a pipeline runs several at a time."""
        self._current: dict[int, int] = {}
        """Block -> its latest use; none of a block that another stage of a pipeline runs."""
        self._watched: list[tuple[nn.Module, Any, RemovableHandle]] = []
        """Blocks, each with its own `forward`, None where it had its class's, and its hook."""

    def watch(self, blocks: Sequence[nn.Module], *, recompute: bool = False, compiles: bool = False) -> None:
        """Reseed on entering and leaving each of these blocks; with `recompute`, checkpoint their activations
        (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016); with `compiles`, compile them."""
        self.recomputes, self.compiles = recompute, compiles
        for number, block in enumerate(blocks):
            own, training = vars(block).get("forward"), block.forward
            if compiles:  # each shape by itself: code for changing shapes is made for those that a rank met first
                training = torch.compile(training, dynamic=False)
            training = partial(self._run_seeded, number, training)
            if recompute:  # which reseeds as well
                training = partial(checkpoint, training, use_reentrant=False, preserve_rng_state=False)
            block.forward = partial(self._forward, number, block, (block.forward, training))
            self._watched.append((block, own, block.register_forward_hook(partial(self._left, number))))

    def unwatch(self) -> None:
        while self._watched:
            block, own, handle = self._watched.pop()
            handle.remove()
            restore_forward(block, own)

    def at(self, step: int, shard: int, *, returns: bool = False) -> None:
        """Set the current step and shard, before each forward pass and each backward pass that `returns` to a shard."""
        if step != self.step:
            self._uses.clear()
        if not returns:
            self._uses[shard] = _Uses()
        self.step, self.shard = step, shard
        self._current.clear()
        seed_all(seed_of(self.seed, step, shard, -1))

    def between(self, step: int, place: str) -> None:
        """Seed what is drawn outside of micro-batches, alike on every process; `place`: where."""
        seed_all(seed_of(self.seed, step, place))

    def _forward(
        self, number: int, block: nn.Module, forwards: tuple[Forward, Forward], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run one of a block's two forward passes: in evaluation as it was, in training with its seed."""
        plain, training = forwards
        if not block.training:
            return plain(*args, **kwargs)
        args, kwargs = views((args, kwargs))
        use = self._current[number] = self._uses.setdefault(self.shard, _Uses()).begin(number)
        return training(use, *args, **kwargs)

    def _run_seeded(self, number: int, forward: Forward, use: int, /, *args: Any, **kwargs: Any) -> Any:
        self._seed(use, number)
        return forward(*args, **kwargs)

    def _left(self, number: int, block: nn.Module, *_: Any) -> None:
        if block.training:
            self._seed(self._current.get(number, 0), number, 0)

    def _seed(self, use: int, *place: int) -> None:
        seed_all(seed_of(self.seed, self.step, self.shard, *place, *(("use", use) if use else ())))


def restore_forward(module: nn.Module, own: Any) -> None:
    """Restore the `forward` of a module's own, or that of its class where it had none."""
    if own is None:
        vars(module).pop("forward", None)
    else:
        module.forward = own


def views(inputs: Any) -> Any:
    """Replace each input tensor of a block that requires a gradient by a view of it.

    Autograd then sums the gradients of the block's own operations before it adds those of other blocks, in every
    strategy. FSDP does the same, because it hooks a block's inputs to find the end of its backward pass.
    """
    if isinstance(inputs, Tensor):
        return inputs.view_as(inputs) if inputs.requires_grad and torch.is_grad_enabled() else inputs
    if type(inputs) is tuple or type(inputs) is list:  # faster than pytree
        return type(inputs)(map(views, inputs))
    if type(inputs) is dict:
        return {key: views(value) for key, value in inputs.items()}
    if inputs is None or isinstance(inputs, bool | int | float | str):
        return inputs
    return pytree.tree_map_only(Tensor, views, inputs)
