"""Runs tasks beside the backward pass, in the order of submission: a thread on the CPU, a stream on a GPU."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from lockstep.core.host.activity import GRADIENTS

Task = Callable[[], Tensor]
Future = torch.futures.Future[Tensor]
Queue = SimpleQueue[tuple[Task, Future] | None]


class CommThread:
    """One thread for tasks on the CPU, which may block in a collective: the callback of a Gloo collective would
    deadlock. Not a ThreadPoolExecutor, because DDP needs torch futures and the process must not wait for the thread."""

    def __init__(self) -> None:
        self._tasks: Queue = SimpleQueue()
        self._errors: list[Exception] = []
        threading.Thread(target=_work, args=(self._tasks, self._errors), name=GRADIENTS, daemon=True).start()
        self.close = weakref.finalize(self, self._tasks.put, None)
        """Let the thread end after all tasks."""

    def run(self, task: Task) -> Future:
        """Submit a task; its error becomes the future's."""
        future: Future = torch.futures.Future()
        self._tasks.put((task, future))
        return future

    def check(self) -> None:
        """Raise the first error of a task: of a future's error, C++ keeps only the message."""
        if self._errors:
            raise self._errors[0]


@torch.no_grad()
def _work(tasks: Queue, errors: list[Exception]) -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        try:
            future.set_result(task())
        except Exception as error:
            errors.append(error)
            future.set_exception(error)  # type: ignore[arg-type]
        del item, task, future  # or they would stay alive while the thread waits


class CommStream:
    """A CUDA stream for tasks: they are enqueued, and the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)

    def run(self, task: Task) -> Future:
        """Enqueue a task behind the current stream's work; errors are raised at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        future: Future = torch.futures.Future(devices=[self.device])
        with torch.cuda.stream(self._stream), torch.no_grad():
            future.set_result(task())  # waiting for the future waits for this stream
        return future

    def check(self) -> None:
        """Errors have been raised already."""

    def close(self) -> None:
        """Nothing to close."""


def comm_worker(device: torch.device) -> CommThread | CommStream:
    """What runs tasks beside the backward pass on a device."""
    return CommStream(device) if device.type == "cuda" else CommThread()
