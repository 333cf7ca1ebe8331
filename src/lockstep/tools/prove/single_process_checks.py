"""Checks in one process: a micro-batch gives the same bits again, and a step's gradient, summed over micro-batches, is
that of all its samples at once; if not, they find the first module that mixes samples.

The gradients are compared in float64 where the model can be computed in it, since both are then equal up to about
1e-16. Randomness is switched off, and BatchNorm uses its running statistics: its own are a micro-batch's by design.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence

from lockstep.base import plugins
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.modules.module_trace import Line, Trace, call_hooks, descriptions, fingerprint
from lockstep.core.numerics.digest import digest
from lockstep.core.numerics.loss import unweighted
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.recipe import build
from lockstep.recipe.components import Components
from lockstep.tools.prove.proof_table import ProofRow
from lockstep.tools.prove.trace_diff import REPEATED, RunTrace, TraceDifference, explained, first_difference
from lockstep.training.loss_checks import generator_states

PASSES = 3
"""Number of passes over the same micro-batches."""
ROUNDINGS = 2**14
"""Roundings of the number format that may lie between two orders of the same sums: 3.6e-12 and 2.0e-3, relative to the
largest gradient of all. Some gradients, such as that of an attention key's bias, are pure rounding."""
ATTEMPTS = 5
"""Attempts to switch off randomness: with one module off, another one may draw random numbers."""

Call = tuple[str, list[Tensor], list[Tensor]]
"""A module's name, and the tensors of its inputs and outputs."""


def checked(components: Components) -> list[ProofRow]:
    """Return the rows that need no other process."""
    repeat = repeat_row(components)
    what = "the split of a step does not change its gradient"
    if repeat.result != "shown":
        why = "outputs differ even for the same micro-batch: mend that first"
        return [repeat, ProofRow(what=what, result="not shown", cause=why)]
    return [repeat, split_row(components, what)]


def repeat_row(components: Components) -> ProofRow:
    """Build the model again, and run two shards of the first step several times, as training does."""
    what, difference = "the same micro-batch gives the same bits", None
    initial = {name: tensor.clone() for name, tensor in components.strategy.state().items()}
    rebuilt = build.initial_model(components.recipe, components.data.train.spec).state_dict()
    if digest(rebuilt) != digest(initial):
        name = next(name for name in initial if fingerprint(initial[name]) != fingerprint(rebuilt[name]))
        difference = TraceDifference(kind="weights", step=0, name=name)
    passes = []
    for _ in range(PASSES):
        passes.append(traced_pass(components))
        for name, tensor in components.strategy.state().items():
            tensor.copy_(initial[name])
    first, *others = (RunTrace().add(lines) for lines in passes)
    for other in others:
        difference = difference or first_difference(first, other)
    how = f"one process, 2 shards, {PASSES} times: every module's outputs, every gradient"
    if difference:
        return ProofRow(what=what, how=how, result="DIFFERS", cause=explained(difference, first, REPEATED))
    return ProofRow(what=what, how=how, result="shown", digest=fingerprint([line.get("hash") for line in passes[0]]))


def traced_pass(components: Components) -> list[Line]:
    """Fetch and run the first and the last shard of the first step, forwards and backwards -> their trace."""
    micro_batches: list[MicroBatch] = next(components.steps(0))
    lines: list[Line] = []
    trace = Trace(components.model, lines.append)
    try:
        for micro_batch in {m.shard: m for m in (micro_batches[0], micro_batches[-1])}.values():
            trace.expect([micro_batch])
            components.strategy.forward_backward([replace(micro_batch, present=frozenset({micro_batch.shard}))])
            components.state.optimizer.zero_grad(set_to_none=True)
    finally:
        trace.remove()
    return lines


def split_row(components: Components, what: str) -> ProofRow:
    train = components.recipe.train
    if train.loss_is == "batch_wise":
        return ProofRow(
            what="the loss compares the samples of a micro-batch",
            how="train.loss_is=batch_wise",
            result="declared",
            cause=f"equal on any number of processes at this micro-batch (train.micro_batch={train.micro_batch}), as "
            "the rows of the runs show; another micro_batch compares other samples, and is another loss",
        )
    micro_batches = next(components.steps(0))
    if len(micro_batches) == 1:
        return ProofRow(what=what, how="a step is one micro-batch, nothing is split", result="shown")
    reason, before = "", torch.get_default_dtype()
    for dtype in (torch.float64, torch.float32):
        try:
            torch.set_default_dtype(dtype)  # of floats computed from integers, such as pixels / 255
            return SplitComparison(components, micro_batches, dtype).row(what)
        except (RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
        finally:
            torch.set_default_dtype(before)
    return ProofRow(what=what, result="not shown", cause=f"all samples at once cannot be computed: {reason}")


class SplitComparison:
    """One step of a fresh model: as its micro-batches, and as one."""

    def __init__(self, components: Components, micro_batches: list[MicroBatch], dtype: torch.dtype) -> None:
        self.components, self.dtype = components, dtype
        self.micro_batches = [
            replace(m, batch={name: t.to(dtype) if t.is_floating_point() else t for name, t in m.batch.items()})
            for m in micro_batches
        ]
        self.model = build.initial_model(components.recipe, components.data.train.spec).to(components.device, dtype)
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.tolerance = ROUNDINGS * torch.finfo(dtype).eps
        self.model.train()
        self.norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm)]
        self.in_evaluation: set[nn.Module] = {*self.norms}
        self.still_random = self.switch_off_randomness()

    def switch_off_randomness(self) -> list[str]:
        """Put just the modules that draw random numbers in evaluation mode -> names of those that still draw."""
        names = {module: name for name, module in self.model.named_modules()}
        random_modules: set[nn.Module] = set()
        for _ in range(ATTEMPTS):
            self.reset()
            random_modules = drawing(self.model, self.micro_batches[0].batch)
            if random_modules <= self.in_evaluation:
                break
            self.in_evaluation |= random_modules
        self.reset()
        return sorted(names[module] for module in random_modules)

    def reset(self) -> None:
        """Restore the initial weights and buffers, and evaluation mode where it is needed."""
        self.model.load_state_dict(self.start)
        for module in self.in_evaluation:
            module.training = False

    def row(self, what: str) -> ProofRow:
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
        self.reset()
        return ProofRow(what=what, how=how, result="DIFFERS", digest=figure, cause=self.cause())

    def error(self) -> float:
        """Return the largest difference of any gradient or the loss, relative to the largest gradient and the loss."""
        whole = self.joined(self.micro_batches)
        loss = self.loss(self.model(whole), whole)
        loss.total.backward()
        named = dict(self.model.named_parameters())
        expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
        self.model.zero_grad(set_to_none=True)
        count, total = float(loss.count), float(loss.total.detach())

        single = plugins.implementation("parallel.strategies", "single")
        precision = Precision("fp32", self.components.device)
        config = single.Config(kind="single")
        strategy = single.build(config, randomness=Randomness(0), precision=precision, exact=True)
        strategy.place(self.model, lambda: self.micro_batches[0].batch)
        self.reset()
        summed = strategy.forward_backward(self.micro_batches)
        if float(summed.count) != count:
            return float("inf")
        scale = max(float(gradient.abs().max()) for gradient in expected.values() if gradient.numel())
        pairs = ((named[name].grad, gradient) for name, gradient in expected.items())
        errors = [gradient if own is None else own - gradient for own, gradient in pairs]
        worst = max(float(error.abs().max()) for error in errors if error.numel())
        if not np.isfinite(worst):
            return float("inf")
        return max(worst / max(scale, 1e-30), abs(float(summed.total) - total) / max(abs(total), 1e-30))

    def cause(self) -> str:
        """Find the first module whose outputs for a sample depend on other samples, else the loss, else neither."""
        first, second = self.micro_batches[:2]
        whole = self.joined([first, second])
        calls_whole, outputs_whole = traced_calls(self.model, whole)
        self.reset()
        calls_alone, outputs_alone = traced_calls(self.model, second.batch)
        sizes = (len(first.indices) + len(second.indices), len(second.indices))
        same = partial(agree, sizes=sizes, tolerance=self.tolerance)
        described = descriptions(self.model)
        for (name, inputs, results), (other, own_inputs, own_results) in zip(calls_whole, calls_alone, strict=False):
            if name != other:
                return f"which modules are called depends on the batch: {described[name]}, or {described[other]}"
            if same(inputs, own_inputs) and not same(results, own_results):
                return (
                    f"module {described[name]} mixes the samples of its batch: what it gives for a sample depends on "
                    "the others beside it (a mean, a normalisation or a division by the number of samples)"
                )
        with torch.no_grad():
            at_once, loss_second = self.loss(outputs_whole, whole), self.loss(outputs_alone, second.batch)
            self.reset()
            loss_first = self.loss(traced_calls(self.model, first.batch)[1], first.batch)
        sums = float(loss_second.total + loss_first.total), float(at_once.total)
        counts = int(loss_second.count) + int(loss_first.count), int(at_once.count)
        if abs(sums[0] - sums[1]) > self.tolerance * abs(sums[1]) or counts[0] != counts[1]:
            return (
                f"the loss is no sum over its samples: two micro-batches give {sums[0]:.6g} over {counts[0]}, both at "
                f"once {sums[1]:.6g} over {counts[1]}; return LossSum(total, count) with a sum, never a mean"
            )
        return "all modules and the loss agree sample by sample, but gradients do not: a backward pass mixes samples"

    def loss(self, outputs: Tensor, batch: Batch) -> LossSum:
        return unweighted(self.model.loss(outputs, batch))

    def joined(self, micro_batches: Sequence[MicroBatch]) -> Batch:
        """Join several batches; rows of different length are padded as collate pads them."""
        pad = {"input_ids": self.components.data.pad_id, **self.components.data.train.spec.pad}
        joined = {}
        for name in micro_batches[0].batch:
            columns = [m.batch[name] for m in micro_batches]
            if len({column.shape[1:] for column in columns}) > 1:
                rows = [row for column in columns for row in column]
                joined[name] = pad_sequence(rows, batch_first=True, padding_value=pad.get(name, 0))
            else:
                joined[name] = torch.cat(columns)
        return joined


def forward(model: Model, batch: Batch, *, enter: Callable[..., None], leave: Callable[..., None]) -> Tensor:
    """Run a forward pass without gradients -> outputs. Around each module's call, `enter(name, module, args, kwargs)`
    and `leave(name, module, inputs, outputs)` are called."""
    handles = call_hooks(model, enter, leave)
    try:
        with torch.no_grad():
            return model(batch)
    finally:
        for handle in handles:
            handle.remove()


def drawing(model: Model, batch: Batch) -> set[nn.Module]:
    """Find modules that draw from torch's, NumPy's or Python's generators in their own code, not in an inner module."""
    random_modules: set[nn.Module] = set()
    stack: list[nn.Module] = []
    last = ""

    def check() -> None:
        nonlocal last
        now = generator_states()
        if stack and now != last:
            random_modules.add(stack[-1])
        last = now

    def enter(_: str, module: nn.Module, *__: Any) -> None:
        check()
        stack.append(module)

    def leave(*_: Any) -> None:
        check()
        stack.pop()

    forward(model, batch, enter=enter, leave=leave)
    return random_modules


def traced_calls(model: Model, batch: Batch) -> tuple[list[Call], Tensor]:
    """Record every call of a module in a forward pass, in the order in which they end, and the outputs."""
    calls: list[Call] = []
    inputs: list[list[Tensor]] = []

    def enter(_: str, __: nn.Module, *arguments: Any) -> None:
        inputs.append(copies(arguments))

    def leave(name: str, _: nn.Module, __: Any, outputs: Any) -> None:
        calls.append((name, inputs.pop(), copies(outputs)))

    return calls, forward(model, batch, enter=enter, leave=leave)


def copies(nest: Any) -> list[Tensor]:
    """Copy the tensors in a nest of sequences and mappings; pytree would skip subclasses such as ModelOutput."""
    if isinstance(nest, Tensor):
        return [nest.detach().clone()]
    values = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, list | tuple) else ()
    return [tensor for value in values for tensor in copies(value)]


def agree(whole: Sequence[Tensor], part: Sequence[Tensor], *, sizes: tuple[int, int], tolerance: float) -> bool:
    """Return whether the last rows of a batch's tensors equal those of its last part; `sizes` are the samples of both.

    Rows lie along the first axis whose length is proportional to the number of samples (a row may be a token). An axis
    that is longer in one, as texts are padded to the longest of a batch, is cut.
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
