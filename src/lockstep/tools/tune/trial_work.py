"""What the process of a trial does: a few real optimizer steps of a recipe, measured; or a sweep of the rate."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import Interrupted, LockstepError
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.host.lifetime import end_with_parent
from lockstep.core.numerics.precision import fix_numerics
from lockstep.data.dataset import selected
from lockstep.run import build
from lockstep.run.components import Components
from lockstep.tools.tune.available_memory import be_the_first_to_go, peak_bytes
from lockstep.tools.tune.loss_curve import Smoothing, has_diverged
from lockstep.tools.tune.trial_request import TrialRequest
from lockstep.training.step import step

TIMED_SECONDS = 1.0
"""Steps are timed for at least so long, and at least one is."""
NO_ROOM = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc", "could not create a primitive")
"""What torch and its libraries say when they get no memory and raise no error of its own kind."""


def work(task: TrialRequest, answers: Connection, log: str) -> NoReturn:
    """Do a task, send the answer in parts, and end this process; what it prints goes to the log."""
    end_with_parent("SIGKILL")
    be_the_first_to_go()
    try:
        file = open(log, "ab")  # noqa: SIM115 (closed at once, below)
    except FileNotFoundError:  # the trial was interrupted while this process was being made
        os._exit(Interrupted.exit_code)
    with file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    code = 0
    try:
        answer(task, answers.send)
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    except Exception as error:
        if is_out_of_memory(error):
            answers.send({"out_of_memory": True, "peak_bytes": device_peak()})
        else:
            traceback.print_exc()
            code = 1
    sys.exit(code)


def answer(task: TrialRequest, send: Callable[[dict[str, Any]], None]) -> None:
    """Build every part for a world of one, then measure or sweep; what is sent are fields of Answer."""
    recipe, world = task.recipe, World()
    fix_numerics(threads=recipe.run.threads, exact=recipe.run.reproducibility == "exact")
    device = process_group.device_of(world)
    if device.type == "cuda" and task.device_bytes is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, task.device_bytes / whole), device)
    with process_group.opened(world, device):
        parts = build.assemble(recipe, world, device)
        send({"began": True})
        send({"losses": swept(parts, task.rates)} if task.rates else measured(parts, task))


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory for something, on the GPU or on the machine."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in NO_ROOM)


def measured(parts: Components, task: TrialRequest) -> dict[str, Any]:
    """One step with the longest samples, then steps in the run's own order, of whose speeds the median counts."""
    ballast, clip = held_in_the_run(parts, task), parts.recipe.optim.clip
    step(parts.state, next(longest(parts).steps(0)), clip=clip)
    settled(parts)
    seconds, begin = [], time.monotonic()
    for micro_batches in parts.steps(0):
        start = time.monotonic()
        step(parts.state, micro_batches, clip=clip)
        settled(parts)
        samples = sum(len(micro_batch.indices) for micro_batch in micro_batches)
        seconds.append((time.monotonic() - start) / samples)
        if time.monotonic() - begin >= TIMED_SECONDS:
            break
    del ballast  # held until here
    return {"peak_bytes": device_peak(), "samples_per_second": 1 / float(np.median(seconds))}


def device_peak() -> int:
    """The most that tensors have taken of the GPU, else that this process has of the machine's memory, in bytes."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else peak_bytes()


def held_in_the_run(parts: Components, task: TrialRequest) -> Tensor:
    """As much memory as a run holds beside what these few steps do, uint8 [bytes]: more partial sums of gradients,
    buckets, and on the CPU this process's share of the copy that a checkpoint is written from."""
    gradients = sum(p.nbytes for p in parts.state.module.parameters() if p.requires_grad)
    state = sum(tensor.nbytes for tensor in parts.state.tensors().values()) if parts.device.type == "cpu" else 0
    return torch.ones(task.copies * gradients + state // task.processes, dtype=torch.uint8, device=parts.device)


def longest(parts: Components) -> Components:
    """One step of the longest samples there are: the most that a step can need. The same parts where all are alike."""
    if parts.data.train.lengths is None:
        return parts
    rows = np.argsort(parts.data.train.lengths, kind="stable")[-parts.order.global_batch :]
    data = replace(parts.data, train=selected(parts.data.train, rows))
    return replace(parts, data=data, order=data.order(), total_steps=1)


def settled(parts: Components) -> None:
    """Wait until the device has done what it was given."""
    if parts.device.type == "cuda":
        torch.cuda.synchronize(parts.device)


def swept(parts: Components, rates: tuple[float, ...]) -> tuple[float, ...]:
    """A step at each rate, from small to large -> the loss before each; ends where it is not finite or diverges."""
    parts.state.rate = lambda number: rates[number]
    losses: list[float] = []
    smoothing = Smoothing(len(rates))
    for micro_batches in parts.steps(0):
        loss, _, is_finite, _ = step(parts.state, micro_batches, clip=parts.recipe.optim.clip).numbers().tolist()
        losses.append(loss if is_finite else float("nan"))
        if not is_finite or has_diverged(smoothing.add(loss), smoothing.best):
            break
    return tuple(losses)
