"""Buffers that a forward pass changes (running statistics, counters, power iterations, queues), by one rule that gives
the same bits on any number of processes. No library has such a rule.

In training every micro-batch starts from the buffers as they were at the start of the step. After the step a floating
point buffer is the mean of the values that the shards left, summed in the shards' tree; an integer buffer advances by
the sum of what each shard added; a bool is flipped if any shard flipped it. BatchNorm's counter counts steps. A buffer
that this does not fit, such as a queue or its pointer, is refused until its rule is declared (buffer_rules.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.errors import ModelError
from lockstep.core.distributed.collectives import all_gather_object, all_reduce_max
from lockstep.core.modules.buffers_in_order import BuffersInOrder
from lockstep.core.modules.module_trace import origin
from lockstep.core.modules.tracked_buffer import TrackedBuffer, restore
from lockstep.core.modules.weight_watch import made_late
from lockstep.core.numerics.batchnorm import is_synchronised
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum

WATCHED_STEPS = 2
"""Number of first steps that compare buffers by value; later ones use autograd's version counter at no cost."""

COMPARED_EVERY = 50
"""Number of steps between two comparisons of buffers by value, after the first steps."""


class BufferUpdates:
    """Buffers of some modules, by name, through steps and their shards. Those of a synchronised BatchNorm are left out:
    they are updated alike on every rank."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = {name: m for name, m in modules.items() if not is_synchronised(m)}
        self.buffers: dict[str, TrackedBuffer] = {}
        self.changing: dict[str, TrackedBuffer] = {}
        self.sums: list[tuple[Sequence[TrackedBuffer], TreeSum]] = []
        """Sums of the contributions of this rank's shards in the current step: one for several buffers of a dtype,
        concatenated, and one for each buffer that has changed for the first time."""
        self.ordered = BuffersInOrder([])
        self.new: set[str] = set()
        """Buffers that have changed for the first time in the current step, on this rank."""
        self.unreducible: dict[str, str] = {}
        """Buffer -> why its value depends on the number of processes."""
        self.steps, self.finished_shards = 0, list[int]()
        self.all_reduce: AllReduce | None = None
        self.updated: list[TrackedBuffer] = []
        """Buffers that the current step has set, until it is kept."""
        self.may_find_new = True
        """Whether a buffer may yet change for the first time, so that ranks agree on it; equal on every rank."""
        self.owners = self._owners()
        """Module of each parameter, by the parameter's name."""
        self._find_buffers(is_first=True)

    def _owners(self) -> dict[str, nn.Module]:
        """Return the modules of the parameters, by name; modules that are not among `modules` as a whole."""
        known, found = {id(module) for module in self.modules.values()}, dict[str, nn.Module]()
        for prefix, module in self.modules.items():
            found |= {f"{prefix}.{key}": module for key, value in module._parameters.items() if value is not None}
            for key, child in module._modules.items():
                if child is not None and id(child) not in known and next(child.parameters(), None) is not None:
                    found[f"{prefix}.{key}"] = child
        return found

    def _refuse_new_weights(self) -> None:
        """Raise ModelError for a parameter, or a module with some, that a forward pass has made."""
        for name, owner in self._owners().items():
            if self.owners.get(name) is not owner:
                raise ModelError(made_late(name.lstrip(".")))

    def _find_buffers(self, *, is_first: bool = False) -> None:
        """Find new buffers, as of the first forward pass. Raises ModelError where a checkpoint would hold them."""
        known = {id(buffer.tensor) for buffer in self.buffers.values()}
        for prefix, module in self.modules.items():
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and name not in self.buffers and id(tensor) not in known:
                    buffer = self.buffers[name] = TrackedBuffer(name, module, key)
                    known.add(id(tensor))
                    if not is_first and buffer.is_saved:
                        raise _late_shape(buffer, "is made in the first forward pass")
        if is_first:
            self.ordered = BuffersInOrder([b for _, b in sorted(self.buffers.items()) if b.rule == "in_order"])

    @property
    def _reducible(self) -> list[TrackedBuffer]:
        return [buffer for name, buffer in self.buffers.items() if name not in self.unreducible]

    def start_step(self, all_reduce: AllReduce) -> None:
        """Remember the values at the start of the step."""
        if self.steps <= WATCHED_STEPS:
            self._refuse_new_weights()
            self._find_buffers()
        elif self.steps % COMPARED_EVERY == 0:
            self._check_silent()
        self.refresh()
        self.all_reduce, self.finished_shards, self.new = all_reduce, [], set()
        self.updated[:] = self.ordered.buffers
        if self.ordered.buffers:
            self.ordered.start_step(all_reduce)
        self.sums = [(buffers, self._tree()) for buffers in self._by_dtype()]

    def _check_silent(self) -> None:
        """Raise ModelError for a buffer that started to change after the first steps, without autograd's knowledge."""
        for buffer in self._reducible:
            if not buffer.is_written and buffer.differs:
                raise ModelError(
                    f"the buffer {buffer.name} ({origin(buffer.module)}) has begun to change after the first steps, in "
                    "a way that autograd does not see (F.batch_norm, .data, NumPy), so that each process has its own: "
                    "let it change from the first step on, or write to it with copy_() or add_()"
                )

    def _by_dtype(self) -> list[list[TrackedBuffer]]:
        """Group the changing buffers by dtype, and by whether they are means, in the same order on every rank."""
        by_dtype: dict[tuple[torch.dtype, bool], list[TrackedBuffer]] = {}
        for _, buffer in sorted(self.changing.items()):
            by_dtype.setdefault((buffer.sum_dtype, buffer.rule == "mean"), []).append(buffer)
        return [*by_dtype.values()]

    def _tree(self) -> TreeSum:
        assert self.all_reduce is not None
        return TreeSum(self.all_reduce.present, self.all_reduce.local_nodes)

    def refresh(self) -> None:
        """Take values that were changed from outside, as by loading a checkpoint, as those of the step's start."""
        for buffer in self._reducible:
            if buffer.is_written and buffer.value is not None:
                buffer.adopt(buffer.value)

    def reset(self) -> None:
        """Restore the values of the step's start."""
        written = [buffer for buffer in self._reducible if self._is_changed(buffer)]
        restore([buffer for buffer in written if buffer.is_reset_in_place])
        for buffer in written:
            if not buffer.is_reset_in_place:
                buffer.install(buffer.before.clone())

    def start_shard(self, shard: int | None) -> None:
        """Prepare the buffers for the forward pass of a shard, or of a ghost (None)."""
        if self.ordered.buffers and shard is not None:
            self.ordered.start_shard(shard)
        self.reset()

    def restart(self, shard: int | None) -> None:
        """Restore the values with which the forward pass of a shard started."""
        self.reset()
        if self.ordered.buffers and shard is not None:
            self.ordered.restart(shard)

    def end_shard(self, shard: int, *, samples: int) -> None:
        """Add the values that a shard of so many samples has left to the sums. Raises ModelError."""
        written = {buffer.name: buffer for buffer in self._reducible if self._is_changed(buffer)}
        self._check_shapes(written.values())
        changed = {name: buffer for name, buffer in written.items() if buffer.is_summed and buffer.has_kept_shape}
        for name, buffer in changed.items():
            if name not in self.changing:
                self.new.add(name)
                self._start_sum(buffer)
        for buffer in self.changing.values():
            buffer.check_fit(samples)
        if self.ordered.buffers:
            self.ordered.end_shard(shard)
        for buffers, tree in self.sums:
            values = [buffer.contribution(is_changed=buffer.name in changed) for buffer in buffers]
            tree.add((shard, 1), torch.cat(values))
        self.finished_shards.append(shard)

    def _check_shapes(self, written: Iterable[TrackedBuffer]) -> None:
        """Stop tracking buffers that have changed their shape or dtype. Raises ModelError where a checkpoint would have
        to hold them, or where other ranks still expect their sum."""
        for buffer in written:
            name = buffer.name
            if buffer.has_kept_shape:
                continue
            if buffer.is_saved or not buffer.is_summed or (name in self.changing and name not in self.new):
                raise _late_shape(buffer, "changes its shape or type in the forward pass")
            self._stop_sum(name)
            self.unreducible[name] = f"changes its shape or type in {origin(buffer.module)}"

    def _stop_sum(self, name: str) -> None:
        """Stop summing a buffer that has changed for the first time in this step."""
        if buffer := self.changing.pop(name, None):
            self.sums = [pair for pair in self.sums if buffer not in pair[0]]

    def _is_changed(self, buffer: TrackedBuffer) -> bool:
        """Return whether a forward pass has changed a buffer; in the first steps also without autograd's knowledge."""
        if self.steps < WATCHED_STEPS and not buffer.is_written and buffer.differs:
            buffer.is_silent = True
        return buffer.is_written

    def _start_sum(self, buffer: TrackedBuffer) -> None:
        """Start the sum of a buffer that changes for the first time: this rank's earlier shards left it unchanged."""
        self.changing[buffer.name], tree = buffer, self._tree()
        self.sums.append(([buffer], tree))
        for shard in self.finished_shards:
            tree.add((shard, 1), buffer.contribution(is_changed=False).clone())

    def end_step(self) -> None:
        """Set the buffers from the shards of all ranks. A collective."""
        self.steps += 1
        assert self.all_reduce is not None
        if self.ordered.buffers:
            self.ordered.end_step()
        if self.may_find_new and dist.get_world_size() > 1:
            self._agree_on_new(self.all_reduce)
        totals = [(buffers, self._total(self.all_reduce, buffers)) for buffers in self._by_dtype()]
        for buffers, total in totals:  # once every exchange has succeeded
            value = total / len(self.all_reduce.present) if buffers[0].rule == "mean" else total
            sizes = [buffer.before.numel() for buffer in buffers]
            parts = zip(buffers, value.split(sizes), torch.isfinite(value).split(sizes), strict=True)
            for buffer, *part in parts:
                buffer.update(*part)
                self.updated.append(buffer)
                if buffer.evidence is not None:
                    buffer.evidence.steps += 1
        restore(self.updated)
        self.sums, self.all_reduce = [], None  # the model's hooks would keep its process group for good
        self._discard()

    def _agree_on_new(self, all_reduce: AllReduce) -> None:
        """Sum a buffer that changes on one rank on all ranks. One small collective in every step."""
        summed = sum(buffer.is_summed for buffer in self.buffers.values())
        flags = torch.tensor([int(bool(self.new)), int(len(self.changing) < summed)])
        all_reduce_max(flags)
        has_new, self.may_find_new = (bool(flag) for flag in flags.tolist())
        self.may_find_new |= self.steps < WATCHED_STEPS
        if not has_new:
            return
        own = self.new, self.buffers.keys() - self.unreducible
        reported = [pair for pair in all_gather_object(own, all_reduce.group) if pair]
        everywhere = set.intersection(*(reducible for _, reducible in reported))
        for name in sorted(set[str]().union(*(new for new, _ in reported))):
            if name not in everywhere:
                self._stop_sum(name)
                self.unreducible.setdefault(name, "is made, or keeps its shape, on some processes only")
            elif name not in self.changing:
                self._start_sum(self.buffers[name])

    def _total(self, all_reduce: AllReduce, buffers: list[TrackedBuffer]) -> Tensor:
        """All-reduce the sums of these buffers, which are of one dtype, concatenated."""
        partials = []
        for node in all_reduce.local_nodes:
            part = dict[TrackedBuffer, Tensor]()
            for summed, tree in self.sums:
                sizes = [buffer.before.numel() for buffer in summed]
                part |= dict(zip(summed, tree.partials[node].split(sizes), strict=True))
            partials.append(torch.cat([part[buffer] for buffer in buffers]))
        if not partials:
            size = sum(buffer.before.numel() for buffer in buffers)
            partials = [torch.empty(size, dtype=buffers[0].sum_dtype, device=buffers[0].before.device)]
        return all_reduce.sum(partials)

    def keep_step(self) -> None:
        """Complete the step: `undo_step` no longer reverts it."""
        self.updated.clear()

    def undo_step(self) -> None:
        """Restore the values of the start of a step that has failed."""
        for buffer in self.updated:
            buffer.before = buffer.previous
        restore(self.updated)
        self.updated.clear()
        self.sums, self.all_reduce = [], None
        self.ordered.leave_step()
        self._discard()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo all changes on exit: for evaluation, which every rank runs on samples of its own."""
        self.refresh()
        try:
            yield
        finally:
            self._discard()

    def _discard(self) -> None:
        """Undo writes that are not part of a step's result."""
        written = [buffer for buffer in self._reducible if self._is_changed(buffer)]
        self._check_shapes(written)
        restore([buffer for buffer in written if buffer.name not in self.unreducible])

    @property
    def notes(self) -> list[str]:
        """Reasons why weights depend on the number of processes, or on where a run was resumed; one line per buffer."""
        unreducible = [
            f"the buffer {name} {why}, which cannot be joined over the processes"
            for name, why in self.unreducible.items()
        ]
        unsaved = [
            f"the buffer {buffer.name} changes in training, but is no part of a checkpoint (persistent=False, in "
            f"{origin(buffer.module)}): a resumed run starts from its first value"
            for buffer in self.changing.values()
            if buffer.key in buffer.module._non_persistent_buffers_set
        ]
        return unreducible + unsaved


def _late_shape(buffer: TrackedBuffer, what: str) -> ModelError:
    return ModelError(
        f"the buffer {buffer.name} {what} ({origin(buffer.module)}), and no checkpoint could be read into the model as "
        "it is built: register it with its final shape, as by running one forward pass on example inputs in build(); "
        "or, if it is nothing but a cache, with persistent=False"
    )


@contextmanager
def copied_buffers(model: nn.Module) -> Iterator[None]:
    """Give a model copies of its buffers inside the block, so that a trial forward pass does not change its own."""
    own = [(m, key, tensor) for m in model.modules() for key, tensor in m._buffers.items() if tensor is not None]
    try:
        for module, key, tensor in own:
            module._buffers[key] = tensor.detach().clone()
        yield
    finally:
        for module, key, tensor in own:
            module._buffers[key] = tensor
