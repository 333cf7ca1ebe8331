"""Problems found in the user's code, with the messages about them."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.core.modules.hidden_state import GENERATORS, Mark
from lockstep.core.modules.module_trace import class_of

LOSS_IS = (
    "train.loss_is is batch_wise: the weights are the same on any number of processes at this train.micro_batch; "
    "another micro_batch compares other samples with each other, and is another loss"
)
GENERATOR_TYPES = tuple(kind.__name__ for kind in GENERATORS)
SEEDED = "draw from torch's, NumPy's or Python's default generators, which Lockstep seeds by step, shard and block"


@dataclass(frozen=True, kw_only=True)
class Finding:
    kind: str
    """state, buffer, parameter, random, process, data or loss; memory: state that shows only by its effect."""
    where: str
    """A module's dotted name with class, file and line, or another description."""
    message: str
    leaves_promise: bool = True
    """Whether the weights may depend on the number of processes or on a resume."""

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "where": self.where, "what": self.message, "leaves_promise": self.leaves_promise}


def kept_outside(root: str, mark: Mark, described: Mapping[str, str]) -> Finding:
    """Return the finding of state outside of parameters and buffers that changes with every forward pass."""
    where = _location(root, mark, described)
    if mark.kind in GENERATOR_TYPES:
        what, fix = "is a generator of the model's own, which goes on with every forward pass", SEEDED
    else:
        what = "changes with every forward pass and is neither a parameter nor a buffer"
        fix = "keep it in a buffer (register_buffer), or make it anew in each forward pass"
    message = f"{where} {what}: each process changes its own, and no checkpoint holds it; {fix}"
    return Finding(kind="state", where=where, message=message)


def _location(root: str, mark: Mark, described: Mapping[str, str]) -> str:
    """Format as 'network.body.3.seen (Counting, my_model.py:17)', with the line that sets it, if found."""
    name = re.split(r"[.\[ ]", root)[-1] if isinstance(mark.owner, nn.Module) else root.split(" of ")[0]
    kind: Any = class_of(mark.owner) if isinstance(mark.owner, nn.Module) else mark.owner
    name = name.rpartition(".")[2]
    try:
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return f"{root} ({getattr(kind, '__qualname__', kind)})"
    word = rf"\b{re.escape(name)}\b"
    mentions = [number for number, line in enumerate(lines) if re.search(word, line)]
    sets = [number for number in mentions if re.search(rf"{word}\s*([-+*/|&]?=[^=]|\[|\.\w+\()", lines[number])]
    sets_after_init = [number for number in sets if not _is_in_init(lines, number)]
    line = next(iter((*sets_after_init, *sets, *mentions)), 0)
    return f"{root} ({getattr(kind, '__qualname__', kind)}, {file}:{first + line})"


def _is_in_init(lines: list[str], number: int) -> bool:
    definitions = [line for line in lines[: number + 1] if re.match(r"\s*(async )?def ", line)]
    return bool(definitions) and "__init__" in definitions[-1]


def other_outputs(described: str, *, is_kept: bool) -> Finding:
    """Return the finding of other outputs for the same micro-batch in a second forward pass."""
    if is_kept:
        why = "it keeps something from one call to the next: keep it in a buffer (register_buffer)"
        return Finding(
            kind="memory",
            where=described,
            message=f"{_subject(described)} gave other outputs when it was called again with equal inputs, and the "
            f"same ones from where it was before; {why}",
        )
    return Finding(
        kind="random",
        where=described,
        message=f"{_subject(described)} gave other outputs for equal inputs, weights and seeds: it draws random "
        "numbers that Lockstep does not seed (numpy.random.default_rng(), a torch.Generator of its own), asks for the "
        f"time or the like, or uses an operation that is not deterministic; {SEEDED}",
    )


def other_ranks(described: str) -> Finding:
    """Return the finding of other outputs for the same micro-batch on another rank."""
    return Finding(
        kind="process",
        where=described,
        message=f"{_subject(described)} gave other outputs on another process for equal inputs, weights and seeds: "
        "it depends on the process (its rank, the number of processes, the environment, the clock)",
    )


def other_data(column: str) -> Finding:
    """Return the finding of samples with other values when fetched again."""
    return Finding(
        kind="data",
        where=f"the data ({column})",
        message=f"the data ({column}) is not the same when the same samples are fetched again, or by another process: "
        "the source, or augment(), draws random numbers that Lockstep does not seed (such as "
        f"numpy.random.default_rng()), depends on the process, or changes what it holds; {SEEDED}",
    )


def mixing_loss(figures: str, *, is_mean: bool) -> Finding:
    """Return the finding of a micro-batch's loss that is not the sum of the losses of its halves."""
    what = "looks like a mean" if is_mean else "is no sum over its samples"
    return Finding(
        kind="loss",
        where="the loss",
        message=f"the loss {what}: it gave {figures}. Micro-batches of unequal size then count alike, and another "
        'train.micro_batch trains otherwise; return LossSum(total, count) with a sum (reduction="sum") and how many it '
        "is the sum of, or declare train.loss_is=batch_wise where a sample's loss depends on the others by design",
        leaves_promise=False,
    )


def _subject(described: str) -> str:
    return described if described == "the loss" else f"module {described}"
