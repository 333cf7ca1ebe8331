"""A process group for processes that share a GPU, which NCCL refuses: tensors on it travel through the CPU, over Gloo.

Gloo has collectives of its own for CUDA tensors, but neither send nor recv.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "gloo-on-shared-gpu"
COLLECTIVES = (
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "recv",
    "scatter",
    "send",
)
"""Methods of a process group, whose first argument is what they write to, except for `send`."""
READS_ONLY = ("barrier", "send")


class StagedWork(dist._Work):
    """A collective on copies in the CPU's memory; `wait` copies its results to the GPU."""

    def __init__(self, work: dist.Work, results: list[tuple[Tensor, Tensor]]) -> None:
        """`results`: (tensor on the GPU, its copy)."""
        super().__init__()
        self.work, self.results = work, results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait(timeout)
        while self.results:
            tensor, copy = self.results.pop()
            tensor.copy_(copy)
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Wait for the collective, and return its future, which is done."""
        outputs = [tensor for tensor, _ in self.results]
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[t.device for t in outputs[:1] if t.is_cuda])
        future.set_result(outputs or self.work.result())
        return future


class StagedGroup(dist.ProcessGroup):
    """Gloo for tensors on the CPU, and on copies there for those of the `staged` type of device."""

    def __init__(self, *place: Any, staged: str = "cuda") -> None:
        """`place`: store, rank, size and timeout, as torch.distributed passes them."""
        store, rank, size, timeout = place
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one for classes in Python
        self.staged = staged
        self.on_cpu = dist.ProcessGroup(store, rank, size)
        gloo, kind = dist.ProcessGroupGloo(store, rank, size, timeout), dist.ProcessGroup.BackendType.GLOO
        self.on_cpu._set_default_backend(kind)
        for group, device in ((self.on_cpu, "cpu"), (self, "cpu"), (self, "cuda")):
            group._register_backend(torch.device(device), kind, gloo)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def run(self, method: str, *arguments: Any, **options: Any) -> StagedWork:
        copies: list[tuple[Tensor, Tensor]] = []
        outputs = [self._staged(each, copies) for each in arguments[:1]]
        results = [] if method in READS_ONLY else list(copies)
        staged = [*outputs, *(self._staged(each, copies) for each in arguments[1:])]
        work = getattr(self.on_cpu, method)(*staged, **options)
        return StagedWork(work, results)

    def _staged(self, value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, list | tuple):
            return [self._staged(each, copies) for each in value]
        if not isinstance(value, Tensor) or value.device.type != self.staged:
            return value
        copies.append((value, value.detach().to("cpu", copy=True)))
        return copies[-1][1]


def _method(name: str) -> Callable[..., StagedWork]:
    return lambda group, *arguments, **options: group.run(name, *arguments, **options)


for _name in COLLECTIVES:
    setattr(StagedGroup, _name, _method(_name))


def register() -> str:
    """Register the backend with torch.distributed -> its name."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])
    return BACKEND
