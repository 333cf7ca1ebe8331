"""How FSDP's gradients are added: after every micro-batch each rank gets its own rows of everybody's gradient, and
adds them to sums that are never whole.

V = shards of a step, S = ranks that share the model, n = numbers of a rank's rows, padded alike on every rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lockstep.base.errors import ModelError
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum


class Rounds:
    """Where a step is: in every round each of the S ranks brings one shard's gradient, or a ghost's."""

    def __init__(self, exchange: AllReduce, shards: Sequence[Sequence[int | None]]) -> None:
        self.exchange = exchange
        """How those finish the tree that hold the same rows, each for micro-batches of its own."""
        self.shards = shards
        """round -> shard of each of the S ranks, None for a ghost."""
        self.number = 0

    @property
    def now(self) -> Sequence[int | None]:
        return self.shards[self.number]

    @property
    def is_last(self) -> bool:
        """Whether the sums are to be finished in this round."""
        return self.number == len(self.shards) - 1


class TreeReduceScatter(ReduceScatter):
    """For one FSDP module: its reduce-scatter, and what comes after it.

    In the step's last round, the module's gradients are the sum over all shards, in the tree's order; what it leaves
    before is of no use.
    """

    rounds: Rounds
    """Set at the start of each step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree: TreeSum | None = None
        self.rows: Tensor | None = None
        self.finished: tuple[Rounds, int] | None = None
        """The last round."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP to put gradients in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        """Gradients [S * n] -> this rank's rows of every rank's, [S, n]; nothing is added yet, and the
        mean that FSDP asks for is not taken."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self.rows = received.view(group.size(), -1)

    def finish(self, output: Tensor) -> None:
        """Add up this round's rows; in the last round the sum over the world is written to `output` [n].

        FSDP's hook after its reduce-scatter; it leaves that out where it is alone, and gives its gradient here.
        """
        rounds, rows = self.rounds, self.rows
        self._enter_round()
        if rows is not None and rows.is_cuda:  # FSDP made it on another stream, to which it goes back too early
            rows.record_stream(torch.cuda.current_stream(rows.device))
        if self.tree is None:
            self.tree = TreeSum(rounds.exchange.present, rounds.exchange.nodes[rounds.exchange.rank])
        for shard, row in zip(rounds.now, output[None].clone() if rows is None else rows, strict=True):
            if shard is not None:
                self.tree.add((shard, 1), row)
        self.rows = None
        if rounds.is_last:
            nodes = rounds.exchange.nodes[rounds.exchange.rank]
            parts = [part for node in nodes if (part := self.tree.take(node)) is not None]
            output.copy_(rounds.exchange.sum(parts or [torch.zeros_like(output)]))
            self.tree = None
        elif rows is not None:  # a row that waits for its sibling would keep all S of them
            self.tree.parts = {
                node: part.clone() if part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() else part
                for node, part in self.tree.parts.items()
            }

    def _enter_round(self) -> None:
        """FSDP hands in a block's gradients whenever it has been left: once, or they could not be told apart."""
        if self.finished == (self.rounds, self.rounds.number):
            raise ModelError(
                f"{self.name or 'the model itself'} runs more than once in a forward pass, and parallel.kind=fsdp "
                "needs blocks that run once: let blocks() name what is around it instead, or use parallel.kind=ddp"
            )
        self.finished = self.rounds, self.rounds.number


class BackendReduceScatter(TreeReduceScatter):
    """The backend's own reduce-scatter, in an order that depends on the world; sums over rounds are left to FSDP."""

    def __init__(self, name: str, place: int) -> None:
        super().__init__(name)
        self.place = place

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        """Gradients [S * n] -> this rank's rows of their sum [n]."""
        if self.rounds.now[self.place] is None:
            input_tensor.zero_()
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group)
        self.rows = output_tensor

    def finish(self, output: Tensor) -> None:
        """Nothing is left to do; where FSDP is alone, a ghost's gradient goes."""
        self._enter_round()
        if self.rows is None and self.rounds.now[self.place] is None:
            output.zero_()
        self.rows = None
