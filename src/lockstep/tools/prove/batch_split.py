"""Whether a step's gradient, summed over micro-batches, is that of all its samples at once; if not, which module is the
first to mix samples.

Shown in float64 where the model can be computed in it, since both are then equal but for about 1e-16; randomness is
switched off, and BatchNorm set to its running statistics: its own belong to the micro-batch by design.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.base import plugins
from lockstep.base.model_contracts import Batch, MicroBatch, Model
from lockstep.core.modules.module_trace import descriptions, fingerprint
from lockstep.core.numerics.loss import unweighted
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.run import build
from lockstep.run.components import Components
from lockstep.tools.prove.proof_table import ProofRow

ROUNDINGS = 2**14
"""How many roundings of the number format may come between two orders of the same sums; relative to the largest
gradient of all (some, such as that of an attention key's bias, are nothing but rounding): 3.6e-12 and 2.0e-3."""
ATTEMPTS = 5
"""Switching one module off may let another one draw."""

Call = tuple[str, list[Tensor], list[Tensor]]
"""A module's name, and the tensors of its inputs and outputs."""


def unsplit(parts: Components, what: str) -> ProofRow:
    """The row about the first step's gradient."""
    if parts.recipe.train.loss_is == "batch_wise":
        return declared(parts.recipe.train.micro_batch)
    micro_batches = next(parts.steps(0))
    if len(micro_batches) == 1:
        return ProofRow(what=what, how="a step is one micro-batch, nothing is split", result="shown")
    reason = ""
    for dtype in (torch.float64, torch.float32):
        try:
            with computed_in(dtype):
                return SplitComparison(parts, micro_batches, dtype).row(what)
        except (RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
    return ProofRow(what=what, how="", result="not shown", cause=f"all samples at once cannot be computed: {reason}")


def declared(size: int) -> ProofRow:
    """The row in its place where a loss compares samples by intention."""
    return ProofRow(
        what="the loss compares the samples of a micro-batch",
        how="train.loss_is=batch_wise",
        result="declared",
        cause=f"equal on any number of processes at this micro-batch (train.micro_batch={size}), as the rows of the "
        "runs show; another micro_batch compares other samples, and is another loss",
    )


@contextmanager
def computed_in(dtype: torch.dtype) -> Iterator[None]:
    """Numbers made of integers, such as pixels / 255, get this type too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class SplitComparison:
    """One step of a fresh model: as its micro-batches, and as one."""

    def __init__(self, parts: Components, micro_batches: list[MicroBatch], dtype: torch.dtype) -> None:
        self.parts, self.dtype = parts, dtype
        self.micro_batches = [replace(m, batch=cast(m.batch, dtype)) for m in micro_batches]
        self.model = build.build_model(parts.recipe, parts.data.train.spec).to(parts.device, dtype)
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.tolerance = ROUNDINGS * torch.finfo(dtype).eps
        self.model.train()
        self.norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm)]
        self.silenced: set[nn.Module] = {*self.norms}
        self.still_random = self.silence()

    def silence(self) -> list[str]:
        """Set to evaluation whatever draws random numbers, and only that; returns who draws even then."""
        names = {module: name for name, module in self.model.named_modules()}
        found: set[nn.Module] = set()
        for _ in range(ATTEMPTS):
            self.quiet()
            found = drawing(self.model, self.micro_batches[0].batch)
            if found <= self.silenced:
                break
            self.silenced |= found
        self.quiet()
        return sorted(names[module] for module in found)

    def quiet(self) -> None:
        """Back to the first weights and buffers, with the silenced modules in evaluation."""
        self.model.load_state_dict(self.start)
        for module in self.silenced:
            module.training = False

    def row(self, what: str) -> ProofRow:
        """The comparison of losses and gradients."""
        number = f"float{torch.finfo(self.dtype).bits}"
        shards, size = len(self.micro_batches), len(self.micro_batches[0].indices)
        samples = sum(len(m.indices) for m in self.micro_batches)
        how = f"{shards} micro-batches of up to {size} against {samples} samples at once, {number}"
        if self.norms:
            how += "; BatchNorm on running statistics (its own are a micro-batch's, by design)"
        if self.still_random:
            names = [descriptions(self.model)[name] for name in self.still_random[:3]]
            cause = f"{', '.join(names)} draws random numbers in evaluation too, other ones for other batches"
            return ProofRow(what=what, how=how, result="not shown", cause=cause)
        error = self.error()
        figure = f"error {error:.1e} (allowed: {self.tolerance:.1e})"
        if error <= self.tolerance:
            return ProofRow(what=what, how=how, result="shown", digest=figure)
        self.quiet()
        return ProofRow(what=what, how=how, result="DIFFERS", digest=figure, cause=self.cause())

    def error(self) -> float:
        """The largest difference of any gradient or the loss, relative to the largest gradient and the loss."""
        whole = joined([m.batch for m in self.micro_batches], self.parts.data.pad_id)
        loss = unweighted(self.model.loss(self.model(whole), whole))
        loss.total.backward()
        named = dict(self.model.named_parameters())
        expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
        self.model.zero_grad(set_to_none=True)
        count, total = float(loss.count), float(loss.total.detach())

        single = plugins.implementation("parallel.strategies", "single")
        precision = Precision("fp32", self.parts.device)
        config = single.Config(kind="single")
        strategy = single.build(config, randomness=Randomness(0), precision=precision, exact=True)
        strategy.place(self.model, lambda: self.micro_batches[0].batch)
        self.quiet()
        found = strategy.forward_backward(self.micro_batches)
        if float(found.count) != count:
            return float("inf")
        scale = max(float(gradient.abs().max()) for gradient in expected.values() if gradient.numel())
        pairs = ((named[name].grad, gradient) for name, gradient in expected.items())
        errors = [gradient if own is None else own - gradient for own, gradient in pairs]
        worst = max(float(error.abs().max()) for error in errors if error.numel())
        if not np.isfinite(worst):
            return float("inf")
        return max(worst / max(scale, 1e-30), abs(float(found.total) - total) / max(abs(total), 1e-30))

    def cause(self) -> str:
        """The first module whose outputs for a sample depend on those beside it, else the loss, else what is left."""
        first, second = self.micro_batches[:2]
        whole = joined([first.batch, second.batch], self.parts.data.pad_id)
        calls, outputs = called(self.model, whole)
        self.quiet()
        alone, own = called(self.model, second.batch)
        sizes = (len(first.indices) + len(second.indices), len(second.indices))
        same = partial(agree, sizes=sizes, tolerance=self.tolerance)
        described = descriptions(self.model)
        for (name, inputs, results), (other, own_inputs, own_results) in zip(calls, alone, strict=False):
            if name != other:
                return f"which modules are called depends on the batch: {described[name]}, or {described[other]}"
            if same(inputs, own_inputs) and not same(results, own_results):
                return (
                    f"module {described[name]} mixes the samples of its batch: what it gives for a sample depends on "
                    "the others beside it (a mean, a normalisation or a division by the number of samples)"
                )
        with torch.no_grad():
            losses = [unweighted(self.model.loss(outputs, whole)), unweighted(self.model.loss(own, second.batch))]
            self.quiet()
            losses.append(unweighted(self.model.loss(called(self.model, first.batch)[1], first.batch)))
        sums = [float(losses[1].total + losses[2].total), float(losses[0].total)]
        counts = [int(losses[1].count) + int(losses[2].count), int(losses[0].count)]
        if abs(sums[0] - sums[1]) > self.tolerance * abs(sums[1]) or counts[0] != counts[1]:
            return (
                f"the loss is no sum over its samples: two micro-batches give {sums[0]:.6g} over {counts[0]}, both at "
                f"once {sums[1]:.6g} over {counts[1]}; return LossSum(total, count) with a sum, never a mean"
            )
        return "all modules and the loss agree sample by sample, but gradients do not: a backward pass mixes samples"


def drawing(model: Model, batch: Batch) -> set[nn.Module]:
    """The modules that draw from torch's, NumPy's or Python's generators in their own code, not in an inner module."""
    found: set[nn.Module] = set()
    open_calls: list[tuple[nn.Module, list[str]]] = []

    def look() -> str:
        now = random_state()
        if open_calls:
            module, since = open_calls[-1]
            if since[0] != now:
                found.add(module)
        return now

    def enter(module: nn.Module, _: Any) -> None:
        open_calls.append((module, [look()]))

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        now = look()
        open_calls.pop()
        if open_calls:
            open_calls[-1][1][0] = now

    hooks: list[Any] = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        with torch.no_grad():
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def random_state() -> str:
    """A hash of every generator's state."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return fingerprint([torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()])


def called(model: Model, batch: Batch) -> tuple[list[Call], Tensor]:
    """Every call of a module in a forward pass, in the order in which they end, and the outputs."""
    calls: list[Call] = []
    inputs: list[list[Tensor]] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append([tensor.clone() for tensor in tensors_of([args, kwargs])])

    def leave(name: str, _: nn.Module, __: Any, outputs: Any) -> None:
        calls.append((name, inputs.pop(), [tensor.clone() for tensor in tensors_of(outputs)]))

    hooks: list[Any] = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(leave, name)))
    try:
        with torch.no_grad():
            outputs = model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, outputs


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of lists and mappings."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, Mapping):
        yield from (tensor for part in value.values() for tensor in tensors_of(part))
    elif isinstance(value, list | tuple):
        yield from (tensor for part in value for tensor in tensors_of(part))


def agree(whole: Sequence[Tensor], part: Sequence[Tensor], *, sizes: tuple[int, int], tolerance: float) -> bool:
    """Whether tensors over a batch hold, in their last rows, those over its last part; `sizes` are samples of both.

    Rows are looked for along the first axis whose length goes with the number of samples (a row may be a token);
    an axis that is longer in one, as texts are padded to the longest of a batch, is cut.
    """
    for a, b in zip(whole, part, strict=False):
        if a.ndim != b.ndim:
            return False
        axis = next((i for i in range(a.ndim) if a.shape[i] * sizes[1] == b.shape[i] * sizes[0]), None)
        rows = a if axis is None else a.narrow(axis, a.shape[axis] - b.shape[axis], b.shape[axis])
        cut = tuple(slice(min(pair)) for pair in zip(rows.shape, b.shape, strict=True))
        left, right = rows[cut], b[cut]
        if left.numel() == 0 or torch.equal(left, right):
            continue
        if not left.is_floating_point():
            return False
        error = torch.where(left == right, 0, left - right).abs().max()  # equal infinities: masks hold them
        largest = torch.where(torch.isfinite(right), right, 0).abs().max()
        if not error <= tolerance * largest:
            return False
    return True


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point columns in another type."""
    return {name: column.to(dtype) if column.is_floating_point() else column for name, column in batch.items()}


def joined(batches: Sequence[Batch], pad_id: int) -> Batch:
    """One batch of several; rows of different length are filled as collate fills them."""
    found = {}
    for name in batches[0]:
        columns = [batch[name] for batch in batches]
        if len({column.shape[1:] for column in columns}) > 1:
            width = max(column.shape[1] for column in columns)
            fill = pad_id if name == "input_ids" else 0
            beyond = [(0, 0) * (column.ndim - 2) + (0, width - column.shape[1]) for column in columns]
            columns = [nn.functional.pad(c, more, value=fill) for c, more in zip(columns, beyond, strict=True)]
        found[name] = torch.cat(columns)
    return found
