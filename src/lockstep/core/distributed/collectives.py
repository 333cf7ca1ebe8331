"""Collectives for everything but gradients: objects, flags, tables and shared errors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist

from lockstep.base.errors import LockstepError
from lockstep.core.distributed.messages import decode, encode
from lockstep.core.distributed.process_group import further_group, timeout_of
from lockstep.core.host.activity import waiting_in

T = TypeVar("T")


def broadcast_object(value: T, group: dist.ProcessGroup | None = None, *, source: int = 0) -> T:
    """Broadcast the value of one rank of a group: for decisions that must not differ, such as those by a clock. Raises
    ModelError on all ranks for a value that messages.py has no form for."""
    with waiting_in(f"a decision of rank {source}"):
        if dist.get_world_size(group) == 1:
            return value
        own = encode(value) if dist.get_rank(group) == source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(own)])
        dist.broadcast(size, group_src=source, group=group)
        message = own if len(own) else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(message, group_src=source, group=group)
    received: T = decode(message)
    return received


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast the values of rank 0, in place."""
    for tensor in tensors:
        with waiting_in("the tensors of rank 0"), torch.no_grad():
            plain = tensor.detach().contiguous()
            dist.broadcast(plain, src=0)
            tensor.copy_(plain)


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's value, by rank, on every rank. Raises ModelError on all ranks, as `broadcast_object` does."""
    with waiting_in("an all-gather of objects"):
        message, sizes = _padded(value, group)
        messages = [torch.empty_like(message) for _ in sizes]
        dist.all_gather(messages, message, group=group)
    return [decode(each[:size]) for each, size in zip(messages, sizes, strict=True)]


def gather_object(value: Any, group: dist.ProcessGroup | None = None, *, to: int = 0) -> list[Any] | None:
    """Gather every rank's value, by rank, on one rank of a group, where it may raise ModelError; None on the others."""
    if dist.get_world_size(group) == 1:
        return [value]
    with waiting_in(f"a gather of objects to rank {to}"):
        message, sizes = _padded(value, group)
        messages = [torch.empty_like(message) for _ in sizes] if dist.get_rank(group) == to else None
        dist.gather(message, messages, group_dst=to, group=group)
    return None if messages is None else [decode(each[:size]) for each, size in zip(messages, sizes, strict=True)]


def wait_for(work: dist.Work | None, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Wait for a message to or from another rank as long as for a collective. Gloo's own limit for messages is the
    timeout with which the group was opened, a few seconds (see Attempts); NCCL's wait does not block the host."""
    assert work is not None  # this rank is in the group
    if tensor.device.type == "cpu":
        work.wait(timeout_of(group))
    else:
        work.wait()


def send(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    wait_for(dist.isend(tensor, group_dst=rank, group=group), tensor, group)


def receive(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    wait_for(dist.irecv(tensor, group_src=rank, group=group), tensor, group)


def send_object(value: Any, rank: int, group: dist.ProcessGroup | None) -> None:
    """Send a value to a rank of a group, which calls `receive_object`."""
    message = encode(value)
    send(torch.tensor([len(message)]), rank, group)
    send(message, rank, group)


def receive_object(rank: int, group: dist.ProcessGroup | None) -> Any:
    """Receive what a rank of a group sends by `send_object`. Raises ModelError, as `broadcast_object` does."""
    size = torch.zeros(1, dtype=torch.int64)
    receive(size, rank, group)
    message = torch.empty(int(size), dtype=torch.uint8)
    receive(message, rank, group)
    return decode(message)


def _padded(value: Any, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[int]]:
    """Encode a value, and pad it to the longest message of the group -> the message, and the length of each rank's."""
    message = encode(value)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(message)]), group=group)
    lengths = [int(size) for size in sizes]
    return torch.nn.functional.pad(message, (0, max(lengths) - len(message))), lengths


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a LockstepError of one rank on every rank of the group, marked as shared. The block calls no collective."""
    own: LockstepError | None = None
    try:
        yield
    except LockstepError as error:
        own = error
    for rank, failure in enumerate(all_gather_object(own, group)):
        if failure is not None:
            failure.is_shared = True
            failure.rank = rank if group is None else dist.get_global_rank(group, rank)
            raise failure


class DisjointSum:
    """An asynchronous all-reduce of a table of which each rank filled other rows and left zeros elsewhere. It adds only
    zeros to each number, so it is exact in any order."""

    def __init__(self, table: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        self.table = table
        self.work = dist.all_reduce(table, group=group, async_op=True) if dist.get_world_size(group) > 1 else None

    def result(self) -> torch.Tensor:
        """Wait for the all-reduce -> the same table, with the rows of all ranks."""
        if self.work is not None:
            with waiting_in("the all-reduce of a table"):
                self.work.wait()
        return self.table


def all_reduce_max(flags: torch.Tensor) -> None:
    """Reduce to the maximum over all ranks, in place."""
    with waiting_in("the all-reduce of flags"):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)


def confirm_on_all_ranks() -> None:
    """Return once every rank has called it."""
    with waiting_in("all ranks to be ready for the update"):
        dist.all_reduce(torch.zeros(1))


def all_reduce_each(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over a group in place, in the backend's order of summation."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def all_reduce_async(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Sum over ranks in place, asynchronously, in the backend's order of summation. With one rank nothing is moved."""
    if dist.get_world_size() == 1:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        done.set_result(buffer)
        return done
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@contextmanager
def reported_once(terminal: TextIO) -> Iterator[None]:
    """Have rank 0 print an error that all ranks share, before any of them exits; then raise it again."""
    try:
        yield
    except LockstepError as error:
        if error.is_shared:
            if dist.get_rank() == 0:
                terminal.write(f"{error}\n")
            with waiting_in("the barrier before exit"):
                dist.barrier()
        raise


def finish_collectives() -> None:
    """Wait until the threads of this process's Gloo groups have left all collectives started so far. Collective.

    Called before a profiler stops: Gloo notes the end of a collective that was started under the profiler in memory
    that the profiler frees when it stops.
    """
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()  # in the order they were made
    for group in groups:
        if "gloo" in dist.get_backend_config(group):
            backend: Any = group._get_backend(torch.device("cpu"))
            backend.barrier().wait()  # which first waits for the works before it


class Agreement:
    """An asynchronous all-reduce of flags, by which all ranks agree at the same step: set at step s, flags are reduced
    while step s+1 runs, and read by all ranks before step s+2."""

    def __init__(self, flags: int) -> None:
        self.group = further_group()
        self.flags = torch.zeros(flags, dtype=torch.int64)
        self.work: dist.Work | None = None

    def post(self, flags: Sequence[int]) -> None:
        """Start the all-reduce of this rank's flags, each at least 0."""
        assert self.work is None, "read the flags of the last step first"
        self.flags = torch.tensor(flags, dtype=torch.int64)
        self.work = dist.all_reduce(self.flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def read(self) -> list[int]:
        """Return the flags of the last post, of each the largest of all ranks; all 0 before the first."""
        if self.work is None:
            return [0] * len(self.flags)
        with waiting_in("the all-reduce of the stop and save flags"):
            self.work.wait()
        self.work = None
        return [int(flag) for flag in self.flags.tolist()]


def local_main_first(task: Callable[[], T], *, is_local_main: bool) -> T | None:
    """Run a task on one process per machine while the others wait, for up to a day -> its result; None on others."""
    with raise_on_all_ranks(further_group(timedelta(days=1))):
        return task() if is_local_main else None
