"""FSDP's reduce-scatter in the shards' tree: after every micro-batch each rank receives its own rows of every rank's
gradient, and adds them to partial sums of these rows only.

V = shards of a step, S = ranks that share the model, n = elements of a rank's rows, padded alike on every rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lockstep.base.errors import ModelError
from lockstep.core.host.activity import waiting_in
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum

WAIT = "the reduce-scatter of gradients"


class Rounds:
    """The rounds of a step: in each, every one of the S ranks runs one micro-batch, or a ghost.

    `all_reduce` is over the replicas of this rank's rows; `shards`: round -> shard of each of the S ranks, None for a
    ghost.
    """

    def __init__(self, all_reduce: AllReduce, shards: Sequence[Sequence[int | None]]) -> None:
        self.all_reduce, self.shards = all_reduce, shards
        self.number = 0

    @property
    def current(self) -> Sequence[int | None]:
        return self.shards[self.number]

    @property
    def is_last(self) -> bool:
        """Whether the sums are completed in this round."""
        return self.number == len(self.shards) - 1


class TreeReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP module.

    After the step's last round the module's gradients are the sum over all shards, in the tree's order; before that
    they mean nothing.
    """

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
        self.finished: dict[torch.dtype | None, tuple[Rounds, int]] = {}
        """Dtype -> the last round for which FSDP has passed gradients of it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the buffer into which FSDP copies gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        """Exchange gradients [S * n] -> this rank's rows of every rank's gradient, [S, n], not added or averaged."""
        received = torch.empty_like(input_tensor)
        with waiting_in(WAIT):
            dist.all_to_all_single(received, input_tensor, group=group)
        self.rows = received.view(group.size(), -1)

    def finish(self, output: Tensor) -> None:
        """Add this round's rows to the tree; in the last round write the sum over all shards to `output` [n].

        FSDP's all-reduce hook, which runs after its reduce-scatter. On a single rank FSDP skips the reduce-scatter, and
        `output` is the gradient.
        """
        rounds, rows = self.rounds, self.rows
        self._enter_round()
        if rows is not None and rows.is_cuda:  # FSDP allocated it on another stream, which may reuse it too early
            rows.record_stream(torch.cuda.current_stream(rows.device))
        if self.part not in self.trees:
            self.trees[self.part] = TreeSum(rounds.all_reduce.present, rounds.all_reduce.local_nodes)
        tree = self.trees[self.part]
        for shard, row in zip(rounds.current, output[None].clone() if rows is None else rows, strict=True):
            if shard is not None:
                tree.add((shard, 1), row)
        self.rows = None
        if rounds.is_last:
            nodes = rounds.all_reduce.local_nodes
            partials = [partial for node in nodes if (partial := tree.take(node)) is not None]
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


class BackendReduceScatter(TreeReduceScatter):
    """The backend's own reduce-scatter, whose order depends on the world size; FSDP adds up the rounds."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(name)
        self.rank = rank

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object
    ) -> None:
        """Reduce gradients [S * n] -> this rank's rows of their sum [n]."""
        if self.rounds.current[self.rank] is None:
            input_tensor.zero_()
        with waiting_in(WAIT):
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group)
        self.rows = output_tensor

    def finish(self, output: Tensor) -> None:
        """Zero a ghost's gradient on a single rank, where FSDP skips the reduce-scatter."""
        self._enter_round()
        if self.rows is None and self.rounds.current[self.rank] is None:
            output.zero_()
        self.rows = None
