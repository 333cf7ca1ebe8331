"""`lockstep`, which counts what a training step, and a micro-batch of an evaluation, would wait for a GPU for:
`warm.run(["counting_lockstep", "waits.json", "train", "c.yaml", ...])`. Workers are forked from this process, and so
have its change."""

import json
import os
import threading
import traceback
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.base import plugins
from lockstep.cli import _app
from lockstep.parallel import replicated
from lockstep.training import evaluation, loop

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.bincount.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.lift_fresh.default,  # of torch.tensor(): a copy from memory that is not pinned
}
"""What a host does on a GPU only after all that has been enqueued."""
FIRST_STEP = 4
"""Earlier ones look for buffers that change without a trace."""


class Waits(TorchDispatchMode):
    """Counts these operations, also with a mask as an index, by Lockstep's innermost line."""

    def __init__(self):
        super().__init__()
        self.lines = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        by_mask = operation is aten.index.Tensor and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if operation in WAITING or by_mask:
            ours = [f for f in traceback.extract_stack() if f.filename.startswith(str(plugins.ROOT))]
            where = f"{ours[-1].filename.removeprefix(str(plugins.ROOT))}:{ours[-1].lineno}" if ours else "elsewhere"
            self.lines[f"{where} {operation}"] += 1
        return operation(*args, **(kwargs or {}))


waits = Waits()


def counting(function, file, is_counted=lambda *_: True):
    def counted(*arguments, **named):
        if not is_counted(*arguments):
            return function(*arguments, **named)
        with waits:
            outcome = function(*arguments, **named)
        with open(file, "w", encoding="utf-8") as target:
            json.dump(waits.lines, target)
        return outcome

    return counted


def run(words):
    replicated.large_embeddings = lambda _: []  # as on a GPU
    written, *words = words
    loop.step = counting(loop.step, written, lambda state, *_: state.step >= FIRST_STEP)
    for owner, name in ((evaluation, "_forward"), (evaluation.SplitTotals, "measure")):  # after such a step
        setattr(owner, name, counting(getattr(owner, name), written, lambda *_: os.path.exists(written)))
    assert threading.active_count() == 1
    _app.app(words)
