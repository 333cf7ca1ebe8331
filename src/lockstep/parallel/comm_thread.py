"""Work that goes on beside the backward pass, in the order in which it was handed in."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

Task = Callable[[], Tensor]
Future = torch.futures.Future[Tensor]
Queue = SimpleQueue[tuple[Task, Future] | None]


class Thread:
    """One thread for tasks on the CPU; it may block in a collective, which deadlocks in the callback of a Gloo one."""

    def __init__(self) -> None:
        self._tasks: Queue = SimpleQueue()
        self._errors: list[Exception] = []
        threading.Thread(target=_work, args=(self._tasks, self._errors), name="gradients", daemon=True).start()
        self.close = weakref.finalize(self, self._tasks.put, None)
        """Let the thread end once everything has been done."""

    def run(self, task: Task) -> Future:
        """Hand in a task; its error becomes the future's."""
        future: Future = torch.futures.Future()
        self._tasks.put((task, future))
        return future

    def check(self) -> None:
        """Raise what went wrong first: a future tells C++ no more than its words."""
        if self._errors:
            raise self._errors[0]


@torch.no_grad()
def _work(tasks: Queue, errors: list[Exception]) -> None:
    while (handed_in := tasks.get()) is not None:
        task, future = handed_in
        try:
            future.set_result(task())
        except Exception as error:
            errors.append(error)
            future.set_exception(error)  # type: ignore[arg-type]
        del handed_in, task, future  # while it waits it keeps nothing alive


class Stream:
    """A stream of its own for tasks on a GPU: they are enqueued, and the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)

    def run(self, task: Task) -> Future:
        """Enqueue a task behind what the caller's stream has been given so far; errors are raised at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        future: Future = torch.futures.Future(devices=[self.device])
        with torch.cuda.stream(self._stream), torch.no_grad():
            future.set_result(task())  # whoever waits for it waits for this stream
        return future

    def check(self) -> None:
        """Errors have been raised already."""

    def close(self) -> None:
        """Nothing is kept open."""


def beside(device: torch.device) -> Thread | Stream:
    """What runs beside the backward pass on a device."""
    return Stream(device) if device.type == "cuda" else Thread()
