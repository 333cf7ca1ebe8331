"""Check the user's model before the first step: does one micro-batch, run again, give the same bits?

A forward pass runs twice from the same seeds, weights and buffers, without gradients. Everything that it changes is
restored, so the check does not affect training. It takes less time than one forward and backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import DataError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model, Strategy
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.modules.call_checksums import LOSS, Call, CallChecksums, first_difference, in_common
from lockstep.core.modules.hidden_state import Mark, Snapshot, changed
from lockstep.core.modules.module_trace import descriptions, fingerprint
from lockstep.core.modules.weight_watch import changed_weight
from lockstep.core.numerics.checksum import checksum
from lockstep.core.numerics.loss import unweighted
from lockstep.core.numerics.seeds import Randomness, generators_restored
from lockstep.training.findings import Finding, kept_outside, other_data, other_outputs, other_ranks
from lockstep.training.loss_checks import LossIs, loss_findings


@dataclass(kw_only=True)
class Passes:
    """Results of two forward passes over the same micro-batch."""

    first: list[Call]
    second: list[Call]
    """It starts from the state that the first pass left outside of parameters and buffers."""
    changed_state: dict[str, Mark]
    """State outside of parameters and buffers that the second pass changed."""
    parameters: list[str]
    """Parameters that the first pass changed."""
    loss: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """The check of a placed model; a collective."""

    model: Model
    module: nn.Module
    """Result of Strategy.place: this rank's parameters."""
    strategy: Strategy
    randomness: Randomness
    loss_is: LossIs = "sample_wise"
    peer: int = 0
    """The rank to compare with; it runs the same part of the model."""

    @cached_property
    def described(self) -> dict[str, str]:
        """Descriptions of modules by their names; only a finding needs them."""
        return {**descriptions(self.model), LOSS: LOSS}

    def findings(self, micro_batch: MicroBatch, again: Batch) -> list[Finding] | None:
        """Return the same findings on every rank; None if the model cannot be run without gradients. `again` is the
        batch of the step's first shard, fetched once more by each rank."""
        refetched = {name: fingerprint(column) for name, column in again.items()}
        first_shard = min(micro_batch.present, default=micro_batch.shard)
        fetched = refetched
        if micro_batch.shard == first_shard:
            fetched = {name: fingerprint(column) for name, column in micro_batch.batch.items()}
        with generators_restored():
            passes, culprit = self._run(replace(micro_batch, shard=first_shard, batch=again))
        own = None if passes is None else self._own_findings(passes, culprit)
        ranks = all_gather_object((own, passes.first if passes else [], self.peer, refetched, fetched))
        batches = [batch for *_, one, other in ranks for batch in (one, other)]
        column = next((name for name in refetched if len({batch.get(name) for batch in batches}) > 1), None)
        findings = [] if column is None else [other_data(column)]
        if any(rank[0] is None for rank in ranks):
            return findings or None
        findings += dict.fromkeys(finding for rank in ranks for finding in rank[0])
        random = [finding for finding in findings if finding.kind in ("random", "memory")]
        has_state = any(finding.kind == "state" for finding in findings)
        findings = [f for f in findings if f not in random[1:] and not (has_state and f.kind == "memory")]
        if random or column is not None:  # in a pipeline, the stages after the first only pass the difference on
            return findings
        differing = (first_difference(*in_common(first, ranks[peer][1])) for _, first, peer, *_ in ranks)
        return findings + next(([other_ranks(self.described[name])] for name in differing if name is not None), [])

    def _run(self, micro_batch: MicroBatch) -> tuple[Passes | None, str | None]:
        """Run two passes and, if they differ, a third from the initial state; returns also the module whose outputs
        differ in the third, although its inputs and state do not. None if the model cannot be run without gradients:
        then the first step raises the error, if there is one."""
        before = _result_or_none(lambda: Snapshot(self.model, is_kept=True))
        if None in all_gather_object(None if before is None else True):
            return None, None
        with self._restored() as reset:
            passes = _result_or_none(lambda: self._run_twice(micro_batch, reset))
            differs = passes is not None and first_difference(passes.first, passes.second) is not None
            third: list[Call] | None = None
            if any(all_gather_object(differs)):
                before.restore()
                reset()
                third = _result_or_none(lambda: self._forward(micro_batch)[0])
            before.restore()
        return passes, first_difference(passes.first, third) if passes is not None and third is not None else None

    def _run_twice(self, micro_batch: MicroBatch, reset: Callable[[], list[str]]) -> Passes:
        first, outputs, written = self._forward(micro_batch)
        between = Snapshot(self.model)
        parameters = sorted(written.union(reset()))
        second, *_ = self._forward(micro_batch)
        return Passes(
            first=first,
            second=second,
            changed_state=changed(between, Snapshot(self.model)),
            parameters=parameters,
            loss=loss_findings(
                self._loss,
                outputs,
                micro_batch.batch,
                seed=partial(self.randomness.at, micro_batch.step, micro_batch.shard),
                loss_is=self.loss_is,
            ),
        )

    def _loss(self, outputs: Any, batch: Batch) -> LossSum:
        return unweighted(self.model.loss(outputs, batch))

    def _forward(self, micro_batch: MicroBatch) -> tuple[list[Call], Any, set[str]]:
        """Run forward pass and loss on copies of the batch -> calls, outputs, parameters that were written to."""
        self.randomness.at(micro_batch.step, micro_batch.shard)
        # compiled, each module's checksums would be, too, and nothing of it is used in a step
        eager = torch.compiler.set_stance("force_eager") if self.randomness.compiles else nullcontext()
        with eager, CallChecksums(self.model) as calls:
            outputs = self.strategy.forward({name: column.clone() for name, column in micro_batch.batch.items()})
        with torch.no_grad():
            total = self._loss(outputs, {name: column.clone() for name, column in micro_batch.batch.items()}).total
        return [*calls.read(), (LOSS, int(calls.sum_of(outputs)), int(calls.sum_of(total)))], outputs, calls.changed

    @contextmanager
    def _restored(self) -> Iterator[Callable[[], list[str]]]:
        """Restore parameters, buffers and mode at the end; yields a function that does so now -> changed parameters."""
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
            changed_names = [name for name, (p, before) in weights.items() if not _same_bits(p.detach(), before)]
            for name in changed_names:
                weights[name][0].data.copy_(weights[name][1])
            return changed_names

        try:
            yield reset
        finally:
            reset()

    def _own_findings(self, passes: Passes, culprit: str | None) -> list[Finding]:
        findings = [
            kept_outside(root, mark, self.described)
            for root, mark in passes.changed_state.items()
            if culprit is None or "enerator" in mark.kind  # other state may just hold the random numbers
        ]
        differing = first_difference(passes.first, passes.second)
        if culprit is not None:
            findings.append(other_outputs(self.described[culprit], is_kept=False))
        elif differing is not None and not findings:
            findings.append(other_outputs(self.described[differing], is_kept=True))
        findings += [Finding(kind="parameter", where=n, message=changed_weight(n)) for n in passes.parameters]
        return findings + ([] if culprit == LOSS else passes.loss)


def check_lone_sample(strategy: Strategy, batch: Batch) -> None:
    """Raise DataError where BatchNorm cannot be trained with one sample, which a micro-batch of the run has."""
    try:
        with generators_restored():
            strategy.forward({name: column[:1].clone() for name, column in batch.items()})
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise DataError(
            "BatchNorm needs more than one sample, and the last micro-batch of an epoch has one (or each: "
            "train.micro_batch=1): choose a train.micro_batch that does not leave one over, or leave a sample out with "
            "data.limit"
        ) from None


def _result_or_none(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:  # such as a model whose forward pass needs gradients: it is not checked
        return None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits, so that NaN equals NaN; torch.equal first, since it is faster."""
    return torch.equal(one, other) or bool(checksum(one) == checksum(other))
