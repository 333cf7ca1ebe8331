"""A trial in a process of its own, which is watched and may run out of memory.

It is forked from a server that has imported everything, and has no launcher around it, unlike those of tools/trials.py:
a search runs about ten trials, imports would take 6 s in each, and the kernel may kill it without harm to the command.
"""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lockstep.base import ctrl_c
from lockstep.core.host.memory_meter import resident_bytes
from lockstep.recipe.recipe import Recipe
from lockstep.tools.trials import TrialFailed, strategy, varied
from lockstep.tools.tune.trial_work import TrialRequest, TrialResult, work

PRELOADED = [
    "lockstep.base.orphaned_start",
    "lockstep.tools.tune.trial_work",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torchmetrics.classification",
]
"""Modules that every trial imports."""

POLL_SECONDS = 0.02
"""Time between polls: a process touches fresh memory at some GB per second, and can get 0.1 GB further meanwhile."""
MEMORY_SIGNALS = {-getattr(signal, name): name for name in ("SIGKILL", "SIGBUS", "SIGABRT") if hasattr(signal, name)}
"""Exit code -> signal by which a process may end when there is no memory left."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    code: int
    """Exit code; negative: the signal that ended it."""
    result: TrialResult
    peak_bytes: int
    """Peak resident memory, as sampled or reported."""
    is_over: bool
    """Whether it was killed here because it exceeded the budget."""
    output: str

    @property
    def killed_by(self) -> str | None:
        """The signal that ended it, if that may mean that memory ran out."""
        return None if self.is_over else MEMORY_SIGNALS.get(self.code)

    @property
    def has_failed(self) -> bool:
        """Whether it ended by an error other than memory."""
        return self.code != 0 and not self.is_over and self.killed_by is None

    def failure(self, what: str) -> TrialFailed:
        return TrialFailed(self.output, self.code, what if self.code != 2 else "")


def run(
    request: TrialRequest, *, budget_bytes: int | None = None, on_result: Callable[[TrialResult], None] = lambda _: None
) -> Trial:
    """Run a trial; kill it as soon as it holds more than the budget, so that the kernel never has to.

    `on_result` is called with what is known so far, whenever that is more.
    """
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    can_fork = can_fork and not torch.cuda.is_available()  # a process that may have initialized CUDA cannot be forked
    context: Any = multiprocessing.get_context("forkserver" if can_fork else "spawn")
    context.set_forkserver_preload(PRELOADED)
    results, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="lockstep-tune-", ignore_cleanup_errors=True) as folder, results:
        log = Path(folder) / "log"
        process = context.Process(target=work, args=(request, sender, str(log)))
        fields: dict[str, Any] = {}
        peak, is_over = 0, False
        try:
            ctrl_c.start(process, context)
            sender.close()
            while process.is_alive() and not is_over:
                process.join(POLL_SECONDS)
                if fresh := received(results):
                    fields |= fresh
                    on_result(TrialResult(**fields))
                peak = max(peak, resident_bytes(process.pid))
                is_over = budget_bytes is not None and peak > budget_bytes
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
        result = TrialResult(**fields | received(results))
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    peak = max(peak, result.peak_bytes)
    return Trial(code=process.exitcode, result=result, peak_bytes=peak, is_over=is_over, output=output)


def received(results: Connection) -> dict[str, Any]:
    """Return the fields that have arrived."""
    fields: dict[str, Any] = {}
    with suppress(EOFError, OSError):
        while results.poll():
            fields |= results.recv()
    return fields


def alone(recipe: Recipe, *, data: dict[str, Any], train: dict[str, Any]) -> Recipe:
    """Return the user's recipe on one process, with some settings changed."""
    sections = {"data": data, "train": {"epochs": None, "stop_metric": None, **train}, "checkpoint": {"best": None}}
    return varied(recipe, sections, parallel=strategy("single"))
