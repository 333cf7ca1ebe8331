"""What a run looks at before its first step: whether the model's code keeps the promise, as far as one micro-batch run
again shows it.

A forward pass is run twice from the same seeds, weights and buffers, without gradients; everything that it changes is
put back, so that training goes on as if nothing had been. Two passes without gradients take less than a micro-batch's
forward and backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model, Strategy
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.modules.call_checksums import LOSS, Call, CallChecksums, first_difference, in_common
from lockstep.core.modules.hidden_state import Mark, Snapshot, changed
from lockstep.core.modules.module_trace import descriptions, fingerprint
from lockstep.core.numerics.checksum import checksum
from lockstep.core.numerics.loss import unweighted
from lockstep.core.numerics.seeds import Randomness, generators_restored
from lockstep.training.finding_messages import kept_outside, other_data, other_outputs, other_ranks, own_parameter
from lockstep.training.findings import Finding
from lockstep.training.loss_checks import LossIs, loss_findings


@dataclass(kw_only=True)
class Seen:
    calls: list[Call]
    """Of the first pass."""
    later: list[Call]
    """Of the second, which starts from whatever the first has kept outside of parameters and buffers."""
    kept: dict[str, Mark]
    """What the second pass has changed outside of them, though it was the same pass."""
    parameters: list[str]
    """Those that the first pass has changed."""
    loss: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FirstSteps:
    """The check of a placed model; all ranks have to make it together."""

    model: Model
    module: nn.Module
    """The placed module, whose parameters are this rank's."""
    strategy: Strategy
    randomness: Randomness
    loss_is: LossIs = "sample_wise"
    peer: int = 0
    """The rank whose modules this one's are compared with: it runs the same part of the model."""

    def findings(self, micro_batch: MicroBatch, again: Batch) -> list[Finding] | None:
        """What is noticed, the same list on every rank; None where the model cannot be run so. `again`: the first
        shard's batch, fetched once more by each."""
        fetched = {name: fingerprint(column) for name, column in again.items()}
        first = min(micro_batch.present, default=micro_batch.shard)
        was = {name: fingerprint(column) for name, column in micro_batch.batch.items()}
        with generators_restored():
            given = replace(micro_batch, shard=first, batch=again)
            seen, culprit = self._seen(given)
        own = None if seen is None else self._own(seen, culprit)
        mine = was if micro_batch.shard == first else fetched
        told = all_gather_object((own, [] if seen is None else seen.calls, self.peer, fetched, mine))
        data = [part for *_, one, other in told for part in (one, other)]
        name = next((name for name in fetched if len({columns.get(name) for columns in data}) > 1), None)
        found = [] if name is None else [other_data(name)]
        if any(rank[0] is None for rank in told):
            return found or None
        found += dict.fromkeys(finding for rank in told for finding in rank[0])
        drawn = [finding for finding in found if finding.kind in ("random", "memory")]
        is_known = any(finding.kind == "state" for finding in found)
        found = [f for f in found if f not in drawn[1:] and not (is_known and f.kind == "memory")]
        if drawn or name is not None:  # in a pipeline, those after the first only hand it on
            return found
        return found + self._between([(rank[1], told[rank[2]][1]) for rank in told])

    def _seen(self, given: MicroBatch) -> tuple[Seen | None, str | None]:
        """Two passes, and a third where they differ: who gave other outputs though nothing was different. None where
        the model cannot be run like this; the first step will say why."""
        before = self._tried(lambda: Snapshot(self.model, is_kept=True))
        if None in all_gather_object(None if before is None else True):
            return None, None
        with self._put_back() as reset:
            seen = self._tried(lambda: self._twice(given, reset))
            differs = seen is not None and first_difference(seen.calls, seen.later) is not None
            third: list[Call] | None = None
            if any(all_gather_object(differs)):
                before.restore()
                reset()
                third = self._tried(lambda: self._passed(given)[0])
            before.restore()
        return seen, first_difference(seen.calls, third) if seen is not None and third is not None else None

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception:  # such as a model whose forward pass needs gradients: not checked, and as it was
            return None

    def _twice(self, given: MicroBatch, reset: Callable[[], list[str]]) -> Seen:
        calls, outputs, written = self._passed(given)
        middle = Snapshot(self.model)
        parameters = sorted(written.union(reset()))
        later, *_ = self._passed(given)
        kept = changed(middle, Snapshot(self.model))
        seed = partial(self._seed, given)
        loss = loss_findings(self._loss, outputs, given.batch, seed=seed, loss_is=self.loss_is)
        return Seen(calls=calls, later=later, kept=kept, parameters=parameters, loss=loss)

    def _loss(self, outputs: Any, batch: Batch) -> LossSum:
        return unweighted(self.model.loss(outputs, batch))

    def _seed(self, given: MicroBatch) -> None:
        self.randomness.at(given.step, given.shard)

    def _passed(self, given: MicroBatch) -> tuple[list[Call], Any, set[str]]:
        """A forward pass and the loss -> calls, outputs, the parameters that were written to. The batch is a copy,
        which the model's code may change."""
        self._seed(given)
        with CallChecksums(self.model) as calls:
            outputs = self.strategy.forward({name: column.clone() for name, column in given.batch.items()})
        with torch.no_grad():
            total = self._loss(outputs, {name: column.clone() for name, column in given.batch.items()}).total
        return [*calls.read(), (LOSS, int(calls.sum_of(outputs)), int(calls.sum_of(total)))], outputs, calls.changed

    @contextmanager
    def _put_back(self) -> Iterator[Callable[[], list[str]]]:
        """Gives what resets parameters and buffers to what they were, which is done at the end, too; it returns the
        names of the parameters that had changed."""
        weights = {name: (p, p.detach().clone()) for name, p in self.module.named_parameters()}
        tables = [(m, dict(m._buffers), m.training) for m in self.model.modules()]
        buffers = [(b, b.clone()) for b in self.model.buffers()]

        def reset() -> list[str]:
            for module, table, is_training in tables:
                module.training = is_training
                module._buffers.clear()
                module._buffers.update(table)
            for buffer, before in buffers:
                if buffer.shape != before.shape:
                    buffer.data = before.clone()
                elif not torch.equal(buffer, before):
                    buffer.data.copy_(before)
            moved = [name for name, (p, before) in weights.items() if not same(p.detach(), before)]
            for name in moved:
                weights[name][0].data.copy_(weights[name][1])
            return moved

        try:
            yield reset
        finally:
            reset()

    def _own(self, seen: Seen, culprit: str | None) -> list[Finding]:
        described = {**descriptions(self.model), LOSS: LOSS}
        kept = {root: mark for root, mark in seen.kept.items() if culprit is None or "enerator" in mark.kind}
        found = [kept_outside(root, mark, described) for root, mark in kept.items()]  # else it may hold what was drawn
        hidden = first_difference(seen.calls, seen.later)
        if culprit is not None:
            found.append(other_outputs(described[culprit], is_kept=False))
        elif hidden is not None and not found:
            found.append(other_outputs(described[hidden], is_kept=True))
        return found + [own_parameter(name) for name in seen.parameters] + ([] if culprit == LOSS else seen.loss)

    def _between(self, pairs: Sequence[tuple[list[Call], list[Call]]]) -> list[Finding]:
        """The first module that gave other outputs on another rank."""
        described = {**descriptions(self.model), LOSS: LOSS}
        names = (first_difference(*in_common(one, other)) for one, other in pairs)
        return next(([other_ranks(described[name])] for name in names if name is not None), [])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, NaNs and all; comparing the numbers first is quicker."""
    return torch.equal(one, other) or bool(checksum(one) == checksum(other))
