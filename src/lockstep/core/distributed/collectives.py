"""What ranks tell each other outside of gradients: one rank's decision, everybody's opinion."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist

from lockstep.base.errors import LockstepError
from lockstep.core.host.activity import waiting_in

T = TypeVar("T")


def broadcast_object(value: T, group: dist.ProcessGroup | None = None, *, source: int = 0) -> T:
    """The value of one rank of a group, on every rank: for decisions that must not differ, such as a clock's."""
    box = [value]
    with waiting_in(f"a decision of rank {source}"):
        dist.broadcast_object_list(box, group_src=source, group=group, device=torch.device("cpu"))
    return box[0]


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank, by rank."""
    box: list[Any] = [None] * dist.get_world_size()
    with waiting_in("an answer of every rank"):
        dist.all_gather_object(box, value, group=group)
    return box


def gather_object(value: T) -> list[T] | None:
    """Every rank's value, by rank, on rank 0; None on the others."""
    if dist.get_world_size() == 1:
        return [value]
    box: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with waiting_in("what every rank tells the main process"):
        dist.gather_object(value, box, dst=0)
    return box


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """All ranks come out of it, or none: an error of Lockstep's on one rank is raised on every rank, as shared.

    Nothing inside may be a collective, or the ranks that got further would wait in it.
    """
    own: LockstepError | None = None
    try:
        yield
    except LockstepError as error:
        own = error
    for number, first in enumerate(all_gather_object(own, group)):
        if first is not None:
            first.is_shared = True
            first.rank = number if group is None else dist.get_global_rank(group, number)
            raise first


def add_disjoint(table: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Complete a table, in place, of which each rank filled other rows and left zeros elsewhere.

    The backend adds, but only zeros to one number each: exact, in any order.
    """
    with waiting_in("the sum of what each rank has found"):
        dist.all_reduce(table, group=group)
    return table


def any_of(flag: torch.Tensor) -> None:
    """The largest of all ranks' numbers, in place."""
    with waiting_in("the word whether gradients have overflowed"):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)


def add_by_backend(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each over a group in place, in an order of the backend's own."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def summed_by_backend(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Sum over ranks in place, in an order of the backend's own, without waiting."""
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@contextmanager
def reported_once(terminal: TextIO) -> Iterator[None]:
    """An error that all ranks share is said by rank 0, before any of them leaves; it goes on its way afterwards."""
    try:
        yield
    except LockstepError as error:
        if error.is_shared:
            if dist.get_rank() == 0:
                terminal.write(f"{error}\n")
            with waiting_in("the end of all ranks"):
                dist.barrier()
        raise


class Agreement:
    """Flags that any rank may raise and all ranks see at the same step, without waiting: raised at step s, they
    travel while step s+1 runs, and are read by all before step s+2."""

    def __init__(self, flags: int) -> None:
        self.group = dist.new_group(backend="gloo")
        self.flags = torch.zeros(flags, dtype=torch.int64)
        self.work: dist.Work | None = None

    def post(self, flags: list[bool]) -> None:
        """Send this rank's flags on their way."""
        assert self.work is None, "read the flags of the last step first"
        self.flags = torch.tensor(flags, dtype=torch.int64)
        self.work = dist.all_reduce(self.flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def read(self) -> list[bool]:
        """The flags of the last post, each true if any rank raised it; all false before the first."""
        if self.work is None:
            return [False] * len(self.flags)
        with waiting_in("the agreement whether to stop or save"):
            self.work.wait()
        self.work = None
        return [bool(flag) for flag in self.flags.tolist()]


def local_main_first(task: Callable[[], object], *, is_local_main: bool) -> None:
    """Run a task on one process per machine while the others wait, for as long as it takes (a day at most)."""
    with raise_on_all_ranks(dist.new_group(backend="gloo", timeout=timedelta(days=1))):
        if is_local_main:
            task()
