"""What one process can check alone: a micro-batch gives the same bits again, and its samples do not mix."""

from dataclasses import replace

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.modules.module_trace import Line, Trace, fingerprint
from lockstep.core.numerics.digest import digest
from lockstep.run import build
from lockstep.run.components import Components
from lockstep.tools.prove.batch_split import split_row
from lockstep.tools.prove.proof_table import ProofRow
from lockstep.tools.prove.trace_diff import REPEATED, RunTrace, TraceDifference, explained, first_difference

PASSES = 3
"""How often the same micro-batches are run."""


def checked(components: Components) -> list[ProofRow]:
    """The rows that need no other process."""
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
