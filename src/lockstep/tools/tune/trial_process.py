"""A trial: a process of its own that does a few steps, is watched, and may die of it."""

import multiprocessing
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lockstep.base import ctrl_c, plugins
from lockstep.core.host.memory_meter import resident_bytes
from lockstep.run.recipe import Recipe
from lockstep.tools.trials import TrialFailed, tail, varied
from lockstep.tools.tune.trial_request import TrialRequest, TrialResult
from lockstep.tools.tune.trial_work import work

PRELOADED = [
    "lockstep.tools.tune.trial_work",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torchmetrics.classification",
]
"""What every trial needs: imported once, by the process from which the system copies them (where it can), instead of
for 6 s in each of them."""

LOOK_SECONDS = 0.02
"""A process touches fresh memory at some GB a second: between two looks it can get 0.1 GB further."""
KILLS = {-getattr(signal, name): name for name in ("SIGKILL", "SIGBUS", "SIGABRT") if hasattr(signal, name)}
"""Ends by which a process may be told that there is no memory: exit code -> signal."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    code: int
    """Exit code; negative: the signal that ended it."""
    answer: TrialResult
    peak_bytes: int
    """The most that it was seen to hold on the machine."""
    is_over: bool
    """Whether it was ended because it held more than the budget."""
    log: str
    """What it wrote: its last words, where it failed."""

    @property
    def killed_by(self) -> str | None:
        """The signal that ended it, where it is one of those that can mean a want of memory."""
        return None if self.is_over else KILLS.get(self.code)

    @property
    def has_failed(self) -> bool:
        """Whether it ended by an error that is none of memory."""
        return self.code != 0 and not self.is_over and self.killed_by is None

    @property
    def last_words(self) -> str:
        return tail(self.log)

    def failure(self, what: str) -> TrialFailed:
        if self.code == 2:  # a mistake of the user's, which says itself what it is
            return TrialFailed(self.last_words, self.code)
        return TrialFailed(f"{self.last_words}\n{what} ended with exit code {self.code}", self.code)


def run(task: TrialRequest, *, budget_bytes: int | None = None) -> Trial:
    """Do a task in a process of its own; one that holds more than the budget is ended at once, so that the machine
    never has to do it."""
    can_copy = "forkserver" in multiprocessing.get_all_start_methods()
    can_copy = can_copy and not torch.cuda.is_available()  # one who may have asked for GPUs cannot be copied
    context: Any = multiprocessing.get_context("forkserver" if can_copy else "spawn")
    context.set_forkserver_preload(PRELOADED)
    answers, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="lockstep-tune-", ignore_cleanup_errors=True) as folder, answers:
        log = Path(folder) / "log"
        process = context.Process(target=work, args=(task, theirs, str(log)))
        said: dict[str, Any] = {}
        peak, is_over = 0, False
        try:
            ctrl_c.start(process, context)
            theirs.close()
            while process.is_alive() and not is_over:
                process.join(LOOK_SECONDS)
                said |= received(answers)
                peak = max(peak, resident_bytes(process.pid))
                is_over = budget_bytes is not None and peak > budget_bytes
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
        answer = TrialResult(**said | received(answers))
        words = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    peak = max(peak, answer.peak_bytes)
    return Trial(code=process.exitcode, answer=answer, peak_bytes=peak, is_over=is_over, log=words)


def received(answers: Connection) -> dict[str, Any]:
    """What has been sent so far."""
    said: dict[str, Any] = {}
    with suppress(EOFError, OSError):
        while answers.poll():
            said |= answers.recv()
    return said


def alone(recipe: Recipe, *, data: dict[str, Any], train: dict[str, Any]) -> Recipe:
    """The user's recipe, on one process and with some settings changed."""
    sections = {"data": data, "train": {"epochs": None, "stop_metric": None, **train}, "checkpoint": {"best": None}}
    return varied(recipe, sections, parallel=plugins.find("parallel.strategies", "single").Config(kind="single"))
