"""What one process can show alone: a micro-batch gives the same bits again, and its samples do not mix."""

from dataclasses import replace

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.modules.module_trace import Line, Trace, fingerprint
from lockstep.core.numerics.digest import digest
from lockstep.run import build
from lockstep.run.components import Components
from lockstep.tools.prove.batch_split import unsplit
from lockstep.tools.prove.proof_table import ProofRow
from lockstep.tools.prove.trace_diff import REPEATED, Traced, TraceDifference, explained, first_difference

PASSES = 3
"""How often the same micro-batches are run."""


def inspected(parts: Components) -> list[ProofRow]:
    """The rows that need no other process."""
    repeat = repeated(parts)
    what = "the split of a step does not change its gradient"
    if repeat.result != "shown":
        why = "outputs differ even for the same micro-batch: mend that first"
        return [repeat, ProofRow(what=what, how="", result="not shown", cause=why)]
    return [repeat, unsplit(parts, what)]


def repeated(parts: Components) -> ProofRow:
    """Build the model again and run two shards of the first step several times, as training does."""
    what, found = "the same micro-batch gives the same bits", None
    initial = {name: tensor.clone() for name, tensor in parts.strategy.state().items()}
    again = build.build_model(parts.recipe, parts.data.train.spec).state_dict()
    if digest(again) != digest(initial):
        name = next(name for name in initial if fingerprint(initial[name]) != fingerprint(again[name]))
        found = TraceDifference(kind="weights", step=0, name=name)
    first: list[Line] = []
    traced = Traced()
    for number in range(PASSES):
        lines = passed(parts)
        for name, tensor in parts.strategy.state().items():
            tensor.copy_(initial[name])
        if number == 0:
            first, traced = lines, Traced().add(lines)
        found = found or first_difference(traced, Traced().add(lines))
    how = f"one process, 2 shards, {PASSES} times: every module's outputs, every gradient"
    if found:
        return ProofRow(what=what, how=how, result="DIFFERS", cause=explained(found, traced, REPEATED))
    return ProofRow(what=what, how=how, result="shown", digest=fingerprint([line.get("hash") for line in first]))


def passed(parts: Components) -> list[Line]:
    """Fetch and run the first and the last shard of the first step, forwards and backwards -> their trace."""
    micro_batches: list[MicroBatch] = next(parts.steps(0))
    lines: list[Line] = []
    trace = Trace(parts.model, lines.append)
    try:
        for micro_batch in {m.shard: m for m in (micro_batches[0], micro_batches[-1])}.values():
            trace.expect([micro_batch])
            parts.strategy.forward_backward([replace(micro_batch, present=frozenset({micro_batch.shard}))])
            parts.state.optimizer.zero_grad(set_to_none=True)
    finally:
        trace.remove()
    return lines
