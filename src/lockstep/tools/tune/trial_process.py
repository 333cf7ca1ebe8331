"""A trial in a process of its own, which is watched and may run out of memory: a few real optimizer steps of a recipe,
or a sweep of the learning rate.

It is forked from a server that has imported everything, and has no launcher around it, unlike those of tools/trials.py:
a search runs about ten trials, imports would take 6 s in each, and the kernel may kill it without harm to the command.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from lockstep.base import ctrl_c, trust
from lockstep.base.errors import Interrupted, LockstepError
from lockstep.base.lifetime import end_with_parent
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.host.matmul_speed import faster_precision
from lockstep.core.host.memory_meter import device_peak_bytes, resident_bytes
from lockstep.core.host.stream_clock import synchronize
from lockstep.core.numerics.precision import fix_numerics
from lockstep.data.dataset import select
from lockstep.recipe import build
from lockstep.recipe.components import Components
from lockstep.recipe.recipe import Recipe
from lockstep.tools.trials import TrialFailed, strategy, varied
from lockstep.tools.tune.loss_curve import Smoothing, has_diverged
from lockstep.training.step import step

PRELOADED = [
    "lockstep.base.orphaned_start",
    "lockstep.tools.tune.trial_process",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torchmetrics.classification",
]
"""Modules that every trial imports."""
POLL_SECONDS = 0.02
"""Time between polls: a process touches fresh memory at some GB per second, and can get 0.1 GB further meanwhile."""
MEMORY_SIGNALS = {-getattr(signal, name): name for name in ("SIGKILL", "SIGBUS", "SIGABRT") if hasattr(signal, name)}
"""Exit code -> signal by which a process may end when there is no memory left."""
TrialVerdict = Literal["fits", "over the budget", "out of memory", "killed", "fails"]
TIMED_SECONDS, TIMED_STEPS = 2.0, 3
"""Minimum time and number of timed steps, after one that fills caches and allocators."""
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc", "could not create a primitive")
"""Texts in messages of torch and its libraries that run out of memory without raising a separate error type."""


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Request to measure a few steps of a recipe or, with `rates`, to sweep the learning rate."""

    recipe: Recipe
    """Recipe for one process."""
    rates: tuple[float, ...] = ()
    """The learning rate of each step."""
    processes: int = 1
    """Processes of the run: they share a checkpoint's copy of the state."""
    copies: int = 0
    """Number of copies of the gradients that the run holds beyond those of these steps."""
    device_bytes: int | None = None
    """Limit of GPU memory; None: all of it."""
    trust: tuple[str, ...] = field(default_factory=trust.arguments)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The end of a trial. The process sends the first fields as they become known, before it may be killed."""

    began: bool = False
    """Whether the data is open, the model and its optimizer are built: what follows depends on the micro-batch."""
    faster_precision: str = ""
    """Sentence on a much faster precision of this processor; empty without one."""
    out_of_memory: bool = False
    device_bytes: int = 0
    """Peak memory of the device: the process's own memory on a CPU, that of tensors on a GPU."""
    samples_per_second: float = 0.0
    steps: int = 0
    """Number of steps of a sweep that are done."""
    losses: tuple[float, ...] = ()
    """Loss per step of a sweep until it ended; the last may not be finite."""
    code: int
    """Exit code; negative: the signal that ended it."""
    resident_bytes: int
    """Peak resident memory, as sampled."""
    is_over: bool
    """Whether it was killed here because it exceeded the budget."""
    output: str

    @property
    def verdict(self) -> TrialVerdict:
        """How it ended; "killed": by a signal that may mean that memory ran out, "fails": by another error."""
        if self.is_over:
            return "over the budget"
        if self.code:
            return "killed" if self.code in MEMORY_SIGNALS else "fails"
        return "out of memory" if self.out_of_memory else "fits"

    def failure(self, what: str) -> TrialFailed:
        return TrialFailed(self.output, self.code, what if self.code != 2 else "")


def run(
    request: TrialRequest, *, budget_bytes: int | None = None, on_steps: Callable[[int], None] = lambda _: None
) -> Trial:
    """Run a trial; kill it as soon as it holds more than the budget, so that the kernel never has to. `on_steps` is
    called with the number of steps of a sweep that are done."""
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
                fields |= (fresh := received(results))
                if "steps" in fresh:
                    on_steps(fresh["steps"])
                peak = max(peak, resident_bytes(process.pid))
                is_over = budget_bytes is not None and peak > budget_bytes
        finally:
            if process.pid is not None:
                process.kill()
                process.join()
        fields |= received(results)
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return Trial(**fields, code=process.exitcode, resident_bytes=peak, is_over=is_over, output=output)


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


def work(request: TrialRequest, results: Connection, log: str) -> NoReturn:
    """Run a trial, send the results, and end this process; its output goes to the log."""
    end_with_parent("SIGKILL")
    trust.accept(request.trust)
    with suppress(OSError):  # where memory runs short, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        file = open(log, "ab")  # noqa: SIM115 (closed at once, below)
    except FileNotFoundError:  # the trial was interrupted while this process was started
        os._exit(Interrupted.exit_code)
    with file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    code = 0
    try:
        run_trial(request, results.send)
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    except Exception as error:
        is_out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if is_out_of_memory or any(text in str(error) for text in OUT_OF_MEMORY):
            results.send({"out_of_memory": True, "device_bytes": device_peak_bytes()})
        else:
            traceback.print_exc()
            code = 1
    sys.exit(code)


def run_trial(request: TrialRequest, send: Callable[[dict[str, Any]], None]) -> None:
    """Build everything for a single process, then measure or sweep; fields of Trial are sent."""
    recipe, world = request.recipe, World()
    exact, precision = recipe.run.reproducibility == "exact", recipe.train.precision
    fix_numerics(threads=recipe.run.threads, exact=exact, precision=precision)
    device = process_group.device_of(world)
    if device.type == "cuda" and request.device_bytes is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, request.device_bytes / whole), device)
    with process_group.opened(world, device):
        components = build.assemble(recipe, world, device)
        parameters = sum(each.numel() for each in components.model.parameters())
        send({"began": True, "faster_precision": faster_precision(precision, device, parameters=parameters)})
        send({"losses": sweep(components, request.rates, send)} if request.rates else measure(components, request))


def measure(components: Components, request: TrialRequest) -> dict[str, Any]:
    """Run one step with the longest samples, then steps in the run's own order; the speed is that of all of them
    together, since texts of one step are about equally long, and those of the next have another length."""
    ballast, clip = allocate_ballast(components, request), components.recipe.optim.clip
    step(components.state, next(longest(components).steps(0)), clip=clip)
    samples, steps = 0, components.steps(0)
    step(components.state, next(steps), clip=clip)
    synchronize(components.device)
    begin = time.monotonic()
    for number, micro_batches in enumerate(steps, start=1):
        step(components.state, micro_batches, clip=clip)
        samples += sum(len(micro_batch.indices) for micro_batch in micro_batches)
        if number >= TIMED_STEPS:
            synchronize(components.device)
            if time.monotonic() - begin >= TIMED_SECONDS:
                break
    seconds = time.monotonic() - begin
    del ballast  # held until here
    return {"device_bytes": device_peak_bytes(), "samples_per_second": samples / seconds}


def allocate_ballast(components: Components, request: TrialRequest) -> Tensor:
    """Allocate what a run holds beyond these few steps, uint8 [bytes]: more partial sums of gradients, buckets, and on
    the CPU this process's share of the copy that a checkpoint is written from."""
    gradients = sum(p.nbytes for p in components.state.module.parameters() if p.requires_grad)
    on_cpu = components.device.type == "cpu"
    state = sum(tensor.nbytes for tensor in components.state.tensors().values()) if on_cpu else 0
    size = request.copies * gradients + state // request.processes
    return torch.ones(size, dtype=torch.uint8, device=components.device)


def longest(components: Components) -> Components:
    """Return components for one step of the longest samples, which needs most memory; unchanged for equal lengths."""
    if components.data.train.lengths is None:
        return components
    rows = np.argsort(components.data.train.lengths, kind="stable")[-components.order.global_batch :]
    train = select(components.data.train, rows)
    order = replace(components.order, samples=len(train), lengths=train.lengths, mixed=None)
    return replace(components, data=replace(components.data.renumbered(rows), train=train), order=order, total_steps=1)


def sweep(
    components: Components, rates: tuple[float, ...], send: Callable[[dict[str, Any]], None]
) -> tuple[float, ...]:
    """Train a step at each rate -> the loss before each; end where it is not finite or diverges."""
    components.state.rate = lambda number: rates[number]
    losses: list[float] = []
    smoothing = Smoothing(len(rates))
    for micro_batches in components.steps(0):
        outcome = step(components.state, micro_batches, clip=components.recipe.optim.clip)
        loss, _, is_finite, _ = outcome.numbers().tolist()
        losses.append(loss if is_finite else float("nan"))
        send({"steps": len(losses)})
        if not is_finite or has_diverged(smoothing.add(loss), smoothing.best):
            break
    return tuple(losses)
