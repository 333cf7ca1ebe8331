"""The sentences in which a run says what it has noticed of a user's code."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.core.modules.hidden_state import GENERATORS, Mark
from lockstep.core.modules.module_trace import class_of
from lockstep.training.findings import Finding

LOSS_IS = (
    "train.loss_is is batch_wise: the weights are the same on any number of processes at this train.micro_batch; "
    "another micro_batch compares other samples with each other, and is another loss"
)
GENERATOR_TYPES = tuple(kind.__name__ for kind in GENERATORS)
SEEDED = "draw from torch's, NumPy's or Python's default generators, which Lockstep seeds by step, shard and block"


def kept_outside(root: str, mark: Mark, described: Mapping[str, str]) -> Finding:
    """Something outside of parameters and buffers changes with every forward pass."""
    where = location(root, mark, described)
    if mark.kind in GENERATOR_TYPES:
        what, mend = "is a generator of the model's own, which goes on with every forward pass", SEEDED
    else:
        what = "changes with every forward pass and is neither a parameter nor a buffer"
        mend = "keep it in a buffer (register_buffer), or make it anew in each forward pass"
    return Finding(
        kind="state",
        where=where,
        sentence=f"{where} {what}: each process changes its own, and no checkpoint holds it; {mend}",
    )


def location(root: str, mark: Mark, described: Mapping[str, str]) -> str:
    """'network.body.3.seen (Counting, my_model.py:17)', with the line on which it is set, where that can be found."""
    name = re.split(r"[.\[ ]", root)[-1] if isinstance(mark.owner, nn.Module) else root.split(" of ")[0]
    kind: Any = class_of(mark.owner) if isinstance(mark.owner, nn.Module) else mark.owner
    name = name.rpartition(".")[2]
    try:
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return f"{root} ({getattr(kind, '__qualname__', kind)})"
    is_set = re.compile(rf"\b{re.escape(name)}\b\s*([-+*/|&]?=[^=]|\[|\.\w+\()")
    used = [number for number, line in enumerate(lines) if is_set.search(line)]
    mentioned = [number for number, line in enumerate(lines) if re.search(rf"\b{re.escape(name)}\b", line)]
    after_init = [number for number in used if not _is_in_init(lines, number)]
    line = next(iter((*after_init, *used, *mentioned)), 0)
    return f"{root} ({getattr(kind, '__qualname__', kind)}, {file}:{first + line})"


def _is_in_init(lines: list[str], number: int) -> bool:
    heads = [line for line in lines[: number + 1] if re.match(r"\s*(async )?def ", line)]
    return bool(heads) and "__init__" in heads[-1]


def other_outputs(described: str, *, is_kept: bool) -> Finding:
    """The same micro-batch gave something else when it was run again."""
    if is_kept:
        why = "it keeps something from one call to the next: keep it in a buffer (register_buffer)"
        return Finding(
            kind="memory",
            where=described,
            sentence=f"{subject_of(described)} gave other outputs when it was called again with equal inputs, and the "
            f"same ones from where it was before; {why}",
        )
    return Finding(
        kind="random",
        where=described,
        sentence=f"{subject_of(described)} gave other outputs for equal inputs, weights and seeds: it draws random "
        "numbers that Lockstep does not seed (numpy.random.default_rng(), a torch.Generator of its own), asks for the "
        f"time or the like, or uses an operation that is not deterministic; {SEEDED}",
    )


def other_ranks(described: str) -> Finding:
    """Two ranks made something else of the same micro-batch."""
    return Finding(
        kind="process",
        where=described,
        sentence=f"{subject_of(described)} gave other outputs on another process for equal inputs, weights and seeds: "
        "it depends on the process (its rank, the number of processes, the environment, the clock)",
    )


def other_data(column: str) -> Finding:
    """The same samples were not the same when they were fetched again."""
    return Finding(
        kind="data",
        where=f"the data ({column})",
        sentence=f"the data ({column}) is not the same when the same samples are fetched again, or by another process: "
        "the source, or augment(), draws random numbers that Lockstep does not seed (such as "
        f"numpy.random.default_rng()), depends on the process, or changes what it holds; {SEEDED}",
    )


def own_parameter(name: str) -> Finding:
    """A forward pass writes to a parameter."""
    return Finding(
        kind="parameter",
        where=name,
        sentence=f"the forward pass changes the parameter {name} in place, by the samples that a process runs itself: "
        "constrain it where it is used instead (max_norm of an embedding: normalise what it gives)",
    )


def mixing_loss(figures: str, *, is_mean: bool) -> Finding:
    """A loss whose parts do not add up."""
    what = "looks like a mean" if is_mean else "is no sum over its samples"
    return Finding(
        kind="loss",
        where="the loss",
        sentence=f"the loss {what}: it gave {figures}. Micro-batches of unequal size then count alike, and another "
        'train.micro_batch trains otherwise; return LossSum(total, count) with a sum (reduction="sum") and how many it '
        "is the sum of, or declare train.loss_is=batch_wise where a sample's loss depends on the others by design",
        leaves_promise=False,
    )


def subject_of(described: str) -> str:
    """With the word for what it is."""
    return described if described == "the loss" else f"module {described}"
