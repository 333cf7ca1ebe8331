"""Weights that a forward pass changes, or whose training starts or stops, while training goes on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from lockstep.base.errors import ModelError
from lockstep.core.modules.dtensors import is_dtensor
from lockstep.core.numerics.checksum import checksum

READ_EVERY = 53
"""Steps between two comparisons of the weights' bits; a prime, so that writes in every n-th step are found, too."""


class WeightWatch:
    """Comparison of weights before and after each forward pass, by autograd's version counters and their storages,
    without reading them. In every READ_EVERY-th step it includes their bits, since writes through .data change neither.
    requires_grad is compared with that of the first pass."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self.weights, self.trained = weights, dict[str, bool]()
        self.sums: dict[str, Tensor] | None = None
        """Checksums of weights in the current forward pass, where it compares their bits."""

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Check the weights around a forward pass of a step, from 0. Raises ModelError."""
        before = {name: _state(weight) for name, weight in self.weights()}
        self.sums = {} if step % READ_EVERY == READ_EVERY - 1 else None
        self.read(self.weights())
        try:
            yield
            self.compare(self.weights())
        finally:
            self.sums = None
        for name, weight in self.weights():
            if name in before and _is_changed(weight, before[name]):
                raise ModelError(changed_weight(name))
            if weight.requires_grad != self.trained.setdefault(name, weight.requires_grad):
                what = "begun" if weight.requires_grad else "ceased"
                raise ModelError(
                    f"the parameter {name} has {what} to require a gradient while training goes on, and what is "
                    "trained is fixed when it starts: set model.unfreeze={PATTERN: STEP} to train a part from a step "
                    "on, or model.freeze for one that is never trained"
                )

    def read(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Note the bits of weights from which the current forward pass starts."""
        if self.sums is not None:
            self.sums = {**_checksums(weights), **self.sums}

    def compare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ModelError where the current forward pass has changed the bits of weights."""
        if self.sums and (changed := _differing(self.sums, _checksums(weights))):
            raise ModelError(changed_weight(changed))


def _state(weight: Tensor) -> tuple[int, UntypedStorage, int]:
    return weight._version, weight.untyped_storage(), int(weight.storage_offset())


def _is_changed(weight: Tensor, before: tuple[int, UntypedStorage, int]) -> bool:
    """Return whether a weight has been written to, or has another storage (`weight.data = ...`) with other values;
    cuDNN moves the same values when it flattens recurrent layers. FSDP ignores the new storage of a shard."""
    version, storage, offset = before
    if weight._version != version or weight.untyped_storage()._cdata == storage._cdata:
        return weight._version != version
    if is_dtensor(weight) or storage.nbytes() < offset * weight.element_size() + weight.nbytes:
        return True
    old = torch.empty(0, dtype=weight.dtype, device=weight.device).set_(storage, offset, weight.shape, weight.stride())
    return not torch.equal(old, weight)


def _checksums(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the checksums of the weights that are in memory: FSDP frees gathered ones."""
    return {name: checksum(weight) for name, weight in weights if weight.untyped_storage().size()}


def _differing(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose checksums differ; waits for the device once."""
    names = [name for name in before if name in after]
    if not names:
        return None
    same = torch.stack([before[name] == after[name] for name in names]).tolist()
    return next((name for name, is_same in zip(names, same, strict=True) if not is_same), None)


def changed_weight(name: str) -> str:
    """Return the message on a parameter that a forward pass writes to."""
    return (
        f"the forward pass changes the parameter {name} in place, by the samples that a process runs itself: constrain "
        "it where it is used instead (max_norm of an embedding: normalise what it gives). A copy that follows other "
        "weights (momentum encoder, target network, moving average) is declared in the model's file, `def "
        'averages(module): return {"copy": ("source", momentum)}`, and updated after each step of the optimizer'
    )


def made_late(name: str) -> str:
    """Return the message on a parameter, or a module with some, that came after the model was built."""
    return (
        f"{name} is made in the forward pass, and no optimizer trains it: make it in __init__, or run the model once "
        "on a batch of zeros where it is built"
    )
