"""DDP with gradients that are sums, added in the shards' tree."""

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import all_reduce_async
from lockstep.core.host import phases
from lockstep.core.host.activity import GRADIENTS, waiting_in
from lockstep.core.modules.dtensors import parameter_views
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.transport import NetworkTransport, transport
from lockstep.parallel.micro_batches import WorldLoss
from lockstep.parallel.replicated import Replicated
from lockstep.parallel.strategies.ddp import Config

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
        """Do nothing: errors have been raised already."""

    def close(self) -> None:
        """Do nothing."""


IS_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
UNSYNCED: dict[str, Any] = {"forward_sync_buffers" if IS_NEW else "broadcast_buffers": False}
"""An argument of DDP, whose name was another before torch 2.13."""


class DataParallel(Replicated):
    """DDP with gradients that are sums, not means, and whose order of addition belongs to the shards."""

    worker: CommThread | CommStream | None = None
    """Runs tasks beside the backward pass."""

    def __init__(self, config: Config, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        super().__init__(randomness, precision, exact=exact)
        self.config = config
        self.summed: list[tuple[Tensor, Tensor]] = []
        """(parameter, sum of its gradients) of this step's buckets."""
        self.num_reduced = 0
        """Number of parameters in this step's buckets."""
        self.last_bucket: Any = None
        """Time when the last bucket's gradients were complete: the backward pass waits from then on."""

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        super().place(model, sample)
        if self.worker is not None:
            self.worker.close()
        apart = [name for name, p in model.named_parameters() if p in self.embedding_rows.gradients]
        self.trainable = sum(parameter.requires_grad for parameter in self.parameters) - len(apart)
        device = self.parameters[0].device
        self.worker = CommStream(device) if device.type == "cuda" else CommThread()
        self.fastest = transport(device)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)
        self.wrapped = DistributedDataParallel(
            model,
            **UNSYNCED,
            bucket_cap_mb=self.config.bucket_mb,
            find_unused_parameters=self.config.find_unused,
            gradient_as_bucket_view=True,
        )
        # A weak reference: the strategy owns DDP, whose C++ side would keep the strategy alive through the hook.
        self.wrapped.register_comm_hook(weakref.ref(self), _comm_hook)
        return model

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run this rank's shards; the backward pass of the last one reduces the gradients."""
        shards, present = micro_batches[0].shards, micro_batches[0].present
        self.is_ghost = micro_batches[0].ghost
        group = self.fastest.group  # its memory is shared out by the usual order of ranks
        self.transport = self.fastest if self.runners is None else NetworkTransport(group)
        self.all_reduce = self.all_reduce_of(shards, present, group)
        self.summed, self.num_reduced, self.last_bucket = [], 0, None
        self.accumulation.start_step(self.all_reduce)
        self.embedding_rows.start_step(self.all_reduce)
        self.passes.buffers.start_step(self.all_reduce)
        if self.passes.buffers.ordered.buffers:  # DDP's own collective in a forward pass, before ranks wait for others
            self.wrapped.reducer._rebuild_buckets()
        started: list[WorldLoss] = []
        try:
            self.passes.run(
                micro_batches,
                self.wrapped,
                no_sync=self.wrapped.no_sync,
                before_last_backward=lambda losses: started.append(self.passes.world_loss(micro_batches, losses)),
            )
            if dist.get_world_size() > 1:
                phases.move_end(self.last_bucket, "backward", "exchange")
        except RuntimeError:
            if self.worker is not None:
                self.worker.check()
            raise
        self._check_all_used()
        with waiting_in("the exchange of embedding rows"), torch.no_grad():
            self.embedding_rows.reduce(self.all_reduce)
        loss = started[0].result()
        self.passes.buffers.end_step()  # at the end: when an exchange fails, nothing of the model has changed
        for parameter, gradient in self.summed:
            if parameter.grad is None:  # DDP skips parameters that the last micro-batch did not use
                parameter.grad = gradient
        return loss

    def _check_all_used(self) -> None:
        """Raise ModelError where DDP skipped a bucket for an unused parameter: DDP reports it one step later."""
        if self.num_reduced == self.trainable:
            return
        unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        what = f"some parameters took no part in the loss of a step ({few(unused)})"
        raise ModelError(f"{what}: set parallel.find_unused=true, or leave them out of the model")

    def sum_in_tree(self, bucket: dist.GradBucket) -> Future:
        """Start the tree's sum of a bucket's partial sums over all ranks, beside the backward pass."""
        assert self.worker is not None
        number, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        self.num_reduced += len(parameters)
        self.summed += zip(parameters, parameter_views(buffer, parameters), strict=True)
        future = self.worker.run(lambda: self._finish(number, buffer, parameters))
        self.last_bucket = phases.moment()
        return future

    def _finish(self, bucket: int, buffer: Tensor, parameters: list[Tensor]) -> Tensor:
        slots = self.transport.slots(bucket, buffer, self.all_reduce.max_nodes)
        self.accumulation.fill(parameters, [parameter_views(slot, parameters) for slot in slots])
        with waiting_in("the gradient exchange"):
            return self.transport.sum(bucket, slots, self.all_reduce)

    def sum_by_backend(self, bucket: dist.GradBucket) -> Future:
        """Start the backend's own all-reduce, whose order depends on the world size."""
        self.num_reduced += len(bucket.parameters())
        self.last_bucket, buffer = phases.moment(), bucket.buffer()
        if self.is_ghost:
            buffer.zero_()
        return all_reduce_async(buffer)


def _comm_hook(strategy: weakref.ref[DataParallel], bucket: dist.GradBucket) -> Future:
    alive = strategy()
    assert alive is not None
    return alive.sum_in_tree(bucket) if alive.exact else alive.sum_by_backend(bucket)


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> DataParallel:
    return DataParallel(config, randomness, precision, exact=exact)
