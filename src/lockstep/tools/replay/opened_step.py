"""One step of a run taken apart: loss and gradient of each shard and each sample, statistics of each module.

Every pass is undone, so that the step itself gives the bits of the run. m = samples of a shard.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.base.errors import ConfigError, LockstepError
from lockstep.base.model_contracts import LossSum, MicroBatch, Model
from lockstep.core.modules import outputs as nests
from lockstep.core.modules.module_trace import Line, Trace, descriptions
from lockstep.core.numerics.loss import with_term_weights
from lockstep.core.reduction.tree import tree_sum
from lockstep.data.dataset import stream_of
from lockstep.inference.evaluate.evaluation_page import data_uri
from lockstep.inference.evaluate.evaluation_samples import readable, without_augmentation
from lockstep.recipe.splits import Splits
from lockstep.training.state import TrainState
from lockstep.training.step import explained_nondeterminism, undo

Row = dict[str, Any]
MOST_SHOWN, MOST_CHARACTERS = 10, 2000
"""Number of samples that are described, those that weigh most; length of a text."""
SIGNS, SMALLEST = {"weight": "gradient", "loss": "loss", "size": "inputs"}, 1e-12
"""Columns by which samples are ranked, with their names on the page; lower bound of their values."""
TOLERANCE = 1e-3
"""Largest relative difference between the loss of a shard and the sum over the outputs of its single samples."""
NEAR = 0.01
"""Part of its range, at either end, in which a function counts as saturated."""
BOUNDS = {"ReLU6": (0.0, 6.0), **dict.fromkeys(("Sigmoid", "Hardsigmoid", "Softmax"), (0.0, 1.0))}
BOUNDS |= dict.fromkeys(("Tanh", "Hardtanh", "Softsign"), (-1.0, 1.0))
"""Class of a module -> the range of its outputs; that of others is the range of their number format."""


def add(sums: np.ndarray, tensor: Tensor, *, bounds: tuple[float, float] | None = None) -> None:
    """Add the numbers of a tensor to sums: largest, squares, zeros, not finite, saturated, number."""
    low, high = bounds or (torch.finfo(tensor.dtype).min, torch.finfo(tensor.dtype).max)
    values, near = tensor.detach().double(), NEAR * high - NEAR * low  # not of the difference: infinite for float64
    finite = values[torch.isfinite(values)]
    ends = (values <= low + near) | (values >= high - near)
    counts = (values == 0).sum(), values.numel() - finite.numel(), ends.sum(), values.numel()
    sums[0] = max(sums[0], float(finite.abs().max()) if finite.numel() else 0.0)
    sums[1:] += [float(each) for each in (finite.square().sum(), *counts)]


class ModuleStatistics:
    """Statistics of every module's outputs, and of the gradients with respect to them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sums: dict[str, list[np.ndarray]] = defaultdict(lambda: [np.zeros(6), np.zeros(6)])
        """Module -> sums over its outputs, and over the gradients."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [m.register_forward_hook(partial(self._leave, name)) for name, m in self.model.named_modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, name: str, module: nn.Module, _: Any, outputs: Any) -> None:
        for tensor in nests.tensors(outputs):
            if tensor.is_floating_point() and tensor.numel() and torch._C._current_graph_task_id() == -1:
                values, gradients = self.sums[name]
                add(values, tensor, bounds=BOUNDS.get(type(module).__name__))
                if tensor.requires_grad:
                    tensor.register_hook(partial(add, gradients))

    def rows(self) -> list[Row]:
        """Return a row for each module that was called; zeros, not finite and saturated are shares."""
        names, keys = descriptions(self.model), ("zeros", "non_finite", "saturated")

        def spread(sums: np.ndarray) -> Row | None:
            largest, squares, *counts, number = sums.tolist()
            rms = math.sqrt(squares / max(number - counts[1], 1))
            shares = {key: count / max(number, 1) for key, count in zip(keys, counts, strict=True)}
            return {"largest": largest, "rms": rms, **shares} if number else None

        pairs = {name: [spread(sums) for sums in pair] for name, pair in self.sums.items()}
        return [{"module": names[name], "outputs": pair[0], "gradients": pair[1]} for name, pair in pairs.items()]


def run_alone(state: TrainState, micro_batch: MicroBatch) -> tuple[LossSum, float]:
    """Run one shard forwards and backwards, as training does -> its loss, and the norm of its gradient; undo it."""
    try:
        with explained_nondeterminism(state.module):
            loss = state.strategy.forward_backward([replace(micro_batch, present=frozenset({micro_batch.shard}))])
        return loss, float(state.strategy.norm()) / state.precision.scaler.get_scale()
    finally:
        undo(state)


def traced(model: Model, state: TrainState, micro_batch: MicroBatch) -> list[Line]:
    """Run one shard -> the hashes of its samples, of every module's outputs and of every gradient."""
    lines: list[Line] = []
    trace = Trace(model, lines.append)
    try:
        trace.expect([micro_batch])
        run_alone(state, micro_batch)
    finally:
        trace.remove()
    return lines


def opened(
    model: Model, state: TrainState, micro_batches: Sequence[MicroBatch], *, shard: int | None, data: Splits | None
) -> Row:
    """Open the next step, or one of its shards; `data` describes its samples. Raises ConfigError for another shard."""
    shards, samples, statistics = list[Row](), list[Row](), ModuleStatistics(model)
    table, first = torch.zeros(micro_batches[0].shards, 2, dtype=torch.float64), micro_batches[0]
    for each in (found := chosen(state, micro_batches, shard)):
        with statistics.watching():
            loss, norm = run_alone(state, each)
        table[each.shard] = torch.tensor([float(loss.total), float(loss.count)], dtype=torch.float64)
        row = measured(loss, norm, shard=each.shard, samples=list(each.indices))
        shards.append(row)
        samples += sample_rows(model, state, each, total=row["total"])
    samples = ranked(samples)
    whole = math.fsum(row["weight"] for row in samples if math.isfinite(row["weight"])) or 1.0
    for number, row in enumerate(samples):
        row["share"] = row.pop("weight") / whole
        if number < MOST_SHOWN:
            row |= described(row, next(each for each in found if each.shard == row["shard"]), data)
    is_whole = {each.shard for each in found} == first.present
    total, count = tree_sum(table, first.present).tolist() if is_whole else (0.0, 0.0)
    return {
        "step": first.step + 1,
        "loss": total / (count or 1.0) if is_whole else None,  # as the run adds it, in the tree's order
        "shards": shards,
        "samples": samples,
        "modules": statistics.rows(),
    }


def ranked(samples: Sequence[Row]) -> list[Row]:
    """Sort the samples of a step, with how far each stands out from the others, and by what: the largest of its robust
    z-scores, of the logarithms of its gradient, its loss and the size of its inputs. First comes what is not finite."""
    scores = np.zeros((len(samples), len(SIGNS)))
    for column, key in enumerate(SIGNS):
        logs = np.array([math.log(max(float(row[key] or 0.0), SMALLEST)) for row in samples])
        known = logs[np.isfinite(logs)] if np.isfinite(logs).any() else np.zeros(1)
        spread = np.median(np.abs(known - np.median(known))) * 1.4826  # the standard deviation of a normal distribution
        scores[:, column] = np.nan_to_num((logs - np.median(known)) / max(spread, 1.0), nan=math.inf)
    best = scores.argmax(axis=1).tolist()
    found = [
        {**row, "stands_out": float(own[place]), "by": list(SIGNS.values())[place]}
        for row, own, place in zip(samples, scores, best, strict=True)
    ]
    return sorted(found, key=lambda row: (row["non_finite_inputs"], row["stands_out"]), reverse=True)


def chosen(state: TrainState, micro_batches: Sequence[MicroBatch], shard: int | None) -> list[MicroBatch]:
    """Return the shards of a step to open, with the weights of the loss's terms. Raises ConfigError."""
    if state.term_counts is not None and micro_batches[0].weights is None:
        micro_batches = with_term_weights(micro_batches, state.term_counts)
    present = [each for each in micro_batches if each.indices]
    if found := [each for each in present if shard in (None, each.shard)]:
        return found
    known = ", ".join(str(each.shard) for each in present)
    raise ConfigError(f"--shard {shard}: step {micro_batches[0].step + 1} has the shards {known}")


def measured(loss: LossSum, norm: float, **more: Any) -> Row:
    """Return loss and gradient norm, of the mean over what the loss counts, with its total and count."""
    total, count = float(loss.total), float(loss.count)
    return {
        **more,
        "loss": total / (count or 1.0),
        "gradient_norm": norm / (count or 1.0),
        "total": total,
        "count": count,
    }


def sample_rows(model: Model, state: TrainState, micro_batch: MicroBatch, *, total: float) -> list[Row]:
    """Return loss and gradient of each sample of a shard: from the pass of the whole shard, with its dropout and its
    BatchNorm, where the losses of the samples' own outputs add up to `total`; else from a pass of each alone."""
    places = range(len(micro_batch.indices))
    with suppress(RuntimeError, ValueError, LookupError, TypeError, AttributeError, LockstepError):
        rows = [sample_row(model, state, micro_batch, place=place, in_shard=True) for place in places]
        if abs(sum(row["total"] for row in rows) - total) <= TOLERANCE * max(abs(total), 1e-6):
            return rows
    return [sample_row(model, state, micro_batch, place=place, in_shard=False) for place in places]


def sample_row(model: Model, state: TrainState, micro_batch: MicroBatch, *, place: int, in_shard: bool) -> Row:
    """Run a shard with the loss of one of its samples, or one sample alone, with the shard's random numbers."""
    number = micro_batch.samples

    def own(tree: Any) -> Any:
        return nests.each(lambda t: t[place : place + 1] if t.ndim and len(t) == number else t, tree)

    batch, plain = own(micro_batch.batch), model.loss
    counts = {} if state.term_counts is None else {name: float(n) for name, n in state.term_counts(batch).items()}
    one = replace(micro_batch, indices=micro_batch.indices[place : place + 1], term_counts=counts)
    if in_shard:
        vars(model)["loss"] = lambda outputs, _: plain(own(outputs), batch)
    floats = [t.double() for t in nests.tensors(batch) if t.is_floating_point() and t.numel()]
    size = max((float(t.square().mean().sqrt()) for t in floats), default=0.0)
    more: Row = {"sample": one.indices[0], "shard": one.shard, "in_shard": in_shard}
    more |= {"non_finite_inputs": sum(int((~torch.isfinite(t)).sum()) for t in floats), "size": size}
    try:
        loss, norm = run_alone(state, one if in_shard else replace(one, batch=batch))
        return measured(loss, norm, **more, weight=norm)
    except (RuntimeError, ValueError):  # such as BatchNorm's, which refuses a single number for each channel
        if in_shard:
            raise
        return {**more, "loss": None, "gradient_norm": None, "total": None, "count": None, "weight": 0.0}
    finally:
        vars(model).pop("loss", None)


def described(row: Row, micro_batch: MicroBatch, data: Splits | None) -> Row:
    """Tell what a sample is: its origin, its label, its text, and the picture that the model was given."""
    place, decode = micro_batch.indices.index(row["sample"]), getattr(data and data.tokenizer, "decode", None)
    columns = {name: column[place].cpu() for name, column in micro_batch.batch.items() if column.ndim}
    origin, known, names = f"sample {row['sample']}", Row(), tuple[str, ...]()
    if data is not None:
        names = data.train.spec.labels
        if stream_of(data.train) is None:
            origin, known = readable(without_augmentation(data.train), row["sample"])
    text, image, label = known.get("text", ""), columns.get("image"), columns.get("label")
    if not text and "input_ids" in columns and decode is not None:
        text = decode(columns["input_ids"].tolist())
    if image is not None and image.is_floating_point():
        low, high = image.nan_to_num().aminmax()
        image = ((image.nan_to_num() - low) / (high - low).clamp_min(1e-12) * 255).to(torch.uint8)
    value = label.item() if label is not None and label.numel() == 1 else ""
    shown = names[value] if isinstance(value, int) and 0 <= value < len(names) else str(value)
    picture = "" if image is None else data_uri({"image": image.numpy()})
    return {"origin": origin, "label": shown, "text": str(text)[:MOST_CHARACTERS], "picture": picture}


def weight_rows(before: Mapping[str, Tensor], state: TrainState) -> list[Row]:
    """Return what a step added to each trained parameter, as root mean squares; the largest ratio comes first."""
    rates = {p: float(group["lr"]) for group in state.optimizer.param_groups for p in group["params"]}
    rows = list[Row]()
    for name, parameter in state.module.named_parameters():
        if name in before and parameter.numel():
            old = before[name].double()
            update, rms = (t.square().mean().sqrt().item() for t in (parameter.detach().double() - old, old))
            ratio = update / rms if rms else math.inf if update else 0.0
            rate = rates.get(parameter, 0.0)
            rows.append({"parameter": name, "rms": rms, "update": update, "ratio": ratio, "learning_rate": rate})
    return sorted(rows, key=lambda row: row["ratio"], reverse=True)
