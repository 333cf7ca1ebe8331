"""FSDP's reduce-scatter in the shards' tree: after every micro-batch each rank receives its own rows of every rank's
gradient, and adds them to partial sums of these rows only.

S = ranks that share the model, n = elements of a rank's rows, padded alike on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lockstep.base.errors import ModelError
from lockstep.core.host.activity import waiting_in
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.topology import Topology
from lockstep.core.reduction.tree import Node, TreeSum, cover

WAIT = "the reduce-scatter of gradients"


@dataclass(eq=False)
class Rounds:
    """The rounds of a step: in each, every one of the S ranks runs one micro-batch, or a ghost.

    `all_reduce` is over the replicas of this rank's rows; `shards`: round -> shard of each of the S ranks, None for a
    ghost; `machines`: of the S ranks, where they add within machines first.
    """

    all_reduce: AllReduce
    shards: Sequence[Sequence[int | None]]
    machines: Topology | None = None
    number: int = 0

    @property
    def current(self) -> Sequence[int | None]:
        return self.shards[self.number]

    @property
    def is_last(self) -> bool:
        """Whether the sums are completed in this round."""
        return self.number == len(self.shards) - 1


class TreeReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP module. After the step's last round the module's gradients are the sum over all
    shards, in the tree's order; before that they mean nothing."""

    rounds: Rounds
    """Set at the start of each step."""
    part: torch.dtype | None = None
    """Dtype of the parameters whose gradients come next, where the module has several."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        """Forget a step that has failed, and its process group."""
        vars(self).pop("rounds", None)
        self.trees: dict[torch.dtype | None, TreeSum] = {}
        self.rows: Tensor | None = None
        self.nodes: Sequence[Node | None] = ()
        """Node of each row, None for a ghost."""
        self.finished: dict[torch.dtype | None, tuple[Rounds, int]] = {}
        """Dtype -> the last round for which FSDP has passed gradients of it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the buffer into which FSDP copies gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        """Exchange gradients [S * n] -> this rank's rows of every rank's gradient, or machine's sums, [..., n]."""
        with waiting_in(WAIT):
            if self.rounds.machines is not None:
                self.nodes, self.rows = added_by_machine(self.rounds, self.rounds.machines, input_tensor)
                return
            received = torch.empty_like(input_tensor)
            dist.all_to_all_single(received, input_tensor, group=group)
        self.nodes, self.rows = self._shards_as_nodes(), received.view(group.size(), -1)

    def _shards_as_nodes(self) -> list[Node | None]:
        return [None if shard is None else (shard, 1) for shard in self.rounds.current]

    def finish(self, output: Tensor) -> None:
        """Add this round's rows to the tree; in the last round write the sum over all shards to `output` [n].

        FSDP's all-reduce hook, after its reduce-scatter; on a single rank there is none, and `output` is the gradient.
        """
        rounds, rows = self.rounds, self.rows
        self._enter_round()
        if rows is not None and rows.is_cuda:  # FSDP allocated it on another stream, which may reuse it too early
            rows.record_stream(torch.cuda.current_stream(rows.device))
        if self.part not in self.trees:
            self.trees[self.part] = TreeSum(rounds.all_reduce.present, rounds.all_reduce.local_nodes)
        tree = self.trees[self.part]
        nodes, parts = (self._shards_as_nodes(), output[None].clone()) if rows is None else (self.nodes, rows)
        for node, row in zip(nodes, parts, strict=True):
            if node is not None:
                tree.add(node, row)
        self.rows = None
        if rounds.is_last:
            targets = rounds.all_reduce.local_nodes
            partials = [partial for node in targets if (partial := tree.take(node)) is not None]
            with waiting_in(WAIT):
                output.copy_(rounds.all_reduce.sum(partials or [torch.zeros_like(output)]))
            del self.trees[self.part]
        elif rows is not None:  # a row that waits for its sibling would keep all S of them
            tree.partials = {
                node: row.clone() if row.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() else row
                for node, row in tree.partials.items()
            }

    def _enter_round(self) -> None:
        """Raise ModelError when FSDP passes a block's gradients twice in a round: they could not be distinguished."""
        if self.finished.get(self.part) == (self.rounds, self.rounds.number):
            raise ModelError(
                f"{self.name or 'the model itself'} runs more than once in a forward pass, and parallel.kind=fsdp "
                "needs blocks that run once: let blocks() name what is around it instead, or use parallel.kind=ddp"
            )
        self.finished[self.part] = self.rounds, self.rounds.number


def added_by_machine(rounds: Rounds, table: Topology, gradients: Tensor) -> tuple[list[Node], Tensor]:
    """Exchange gradients [S * n] within each machine, add its shards in the tree, and exchange the partial sums between
    machines -> nodes of the round, and this rank's rows of them [nodes, n]. S = M machines * L ranks."""
    present, current, machines = rounds.all_reduce.present, rounds.current, table.machines
    shards = [frozenset(shard for rank in ranks if (shard := current[rank]) is not None) for ranks in machines]
    nodes = [cover(each, present) if each else () for each in shards]
    rows = gradients.view(len(current), -1)
    sent = torch.stack([rows[rank] for column in zip(*machines, strict=True) for rank in column])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=table.row_group)
    total = TreeSum(present, nodes[table.row])
    for rank, part in zip(table.ranks, received.view(len(table.ranks), len(machines), -1), strict=True):
        if (shard := current[rank]) is not None:
            total.add((shard, 1), part)
    own = [total.partials[node] for node in nodes[table.row]]
    partials = torch.stack(own, 1).flatten(0, 1) if own else sent[:0]
    counts = [len(each) for each in nodes]
    rows = sent.new_empty(sum(counts), sent.shape[1])
    dist.all_to_all_single(rows, partials, counts, [len(own)] * len(machines), group=table.column_group)
    return [node for each in nodes for node in each], rows


class BackendReduceScatter(TreeReduceScatter):
    """The backend's own reduce-scatter, whose order depends on the world size; FSDP adds up the rounds."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        """Reduce gradients [S * n] -> this rank's rows of their sum [n]."""
        if self.rounds.current[group.rank()] is None:
            input_tensor.zero_()
        with waiting_in(WAIT):
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group)
        self.rows = output_tensor

    def finish(self, output: Tensor) -> None:
        """Zero a ghost's gradient on a single rank, where FSDP skips the reduce-scatter."""
        self._enter_round()
        if self.rows is None and self.rounds.current[0] is None:
            output.zero_()
        self.rows = None
