"""Randomness that belongs to a place in the run, not to the process that happens to be there."""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]
GeneratorStates = tuple[Tensor, Tensor | None, Any, Any]


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from any numbers and words; unrelated for any two different lists of them."""
    packed = b"".join(p.encode() + b"\0" if isinstance(p, str) else struct.pack("<q", p) for p in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int) -> None:
    """Seed the CPU's and this process's accelerator's generator.

    Much cheaper than torch.manual_seed, which walks over every device: 1.4 µs against 156 µs on the CPU.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed torch, Python and NumPy: 7 µs, of which 4 are Python's and 2 NumPy's.

    Done at every block, that is 2% of the smallest micro-batch there is here (the CNN's 16 digits: 2 blocks, 1 ms),
    and nothing for larger ones. Keeping and setting states would cost more (NumPy's alone 30 µs).
    """
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def generators() -> GeneratorStates:
    """Where torch's (the CPU's and this process's accelerator's), NumPy's and Python's generators are: about 10 KB."""
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state() if has_cuda else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def set_generators(states: GeneratorStates) -> None:
    """Let them go on from there."""
    cpu, cuda, numpy, python = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    np.random.set_state(numpy)
    random.setstate(python)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Afterwards they go on as if nothing had been drawn inside."""
    states = generators()
    try:
        yield
    finally:
        set_generators(states)


class Randomness:
    """Reseeds from (seed, step, shard, block) whenever a block is entered in training, forwards or in recomputation,
    and once more when it is left: so it does not matter either whether what follows runs where the block did."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.shard = seed, 0, 0
        self.recomputes = False
        """Whether blocks run again in the backward pass."""

    def watch(self, blocks: Sequence[nn.Module], *, recompute: bool = False) -> None:
        """Reseed on entering and leaving each of these blocks; with `recompute` they keep no activations but run again
        in the backward pass (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016)."""
        self.recomputes = recompute
        for number, block in enumerate(blocks):
            seeded = partial(self._seeded, number, block.forward)
            block.forward = partial(_in_training, block, block.forward, _recomputed(seeded) if recompute else seeded)
            block.register_forward_hook(partial(self._left, number))

    def at(self, step: int, shard: int) -> None:
        """Say where the run is, before every forward and every backward pass."""
        self.step, self.shard = step, shard
        seed_all(seed_of(self.seed, step, shard, -1))

    def _seeded(self, number: int, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        seed_all(seed_of(self.seed, self.step, self.shard, number))
        return forward(*args, **kwargs)

    def _left(self, number: int, block: nn.Module, *_: Any) -> None:
        if block.training:
            seed_all(seed_of(self.seed, self.step, self.shard, number, 0))


def _in_training(block: nn.Module, plain: Forward, training: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if not block.training:
        return plain(*args, **kwargs)
    args, kwargs = views((args, kwargs))
    return training(*args, **kwargs)


def views(given: Any) -> Any:
    """The inputs of a block, each tensor that requires a gradient as a view of itself.

    Autograd then sums the gradients from the block's own operations before it adds those of other blocks, in every
    strategy. FSDP hooks the inputs to learn that a block's backward pass has ended, which fixes this order for it.
    """
    if isinstance(given, Tensor):
        return given.view_as(given) if given.requires_grad and torch.is_grad_enabled() else given
    if type(given) is tuple or type(given) is list:
        return type(given)(map(views, given))
    if type(given) is dict:
        return {key: views(value) for key, value in given.items()}
    return given if given is None or isinstance(given, bool | int | float | str) else pytree.tree_map(_view, given)


def _view(leaf: Any) -> Any:
    return views(leaf) if isinstance(leaf, Tensor) else leaf


def _recomputed(forward: Forward) -> Forward:
    """A forward pass that is run again for the backward pass, its reseeding with it."""
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
