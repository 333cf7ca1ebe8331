"""BatchNorm's running statistics, advanced once per step by the mean over the step's shards."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.runtime.exchange import Exchange
from lockstep.runtime.tree_reduce import TreeSum


class RunningStatistics:
    """Every shard starts from the statistics of the step's start, and so leaves its own next ones behind; the mean
    of those, summed in the shards' tree, becomes the statistics after the step. A mean that is not finite leaves them
    as they were.

    Statistics of a batch itself stay those of the micro-batch, whatever the number of processes.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self.buffers: list[Tensor] = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
        self.counters: list[Tensor] = [m.num_batches_tracked for m in norms if m.num_batches_tracked is not None]
        self.before: list[Tensor] = []
        self.total: TreeSum | None = None

    def start_step(self, exchange: Exchange) -> None:
        """Remember where the step starts from."""
        self.before = [tensor.clone() for tensor in (*self.buffers, *self.counters)]
        self.total = TreeSum(exchange.present, exchange.nodes[exchange.rank])

    def start_shard(self) -> None:
        """Go back to the step's start."""
        for tensor, value in zip((*self.buffers, *self.counters), self.before, strict=True):
            tensor.copy_(value)

    def end_shard(self, shard: int) -> None:
        """Keep what the shard has left behind."""
        if self.buffers and self.total is not None:
            self.total.add((shard, 1), torch.cat([buffer.flatten() for buffer in self.buffers]))

    def end_step(self, exchange: Exchange) -> None:
        """Set the mean over the shards of the whole world."""
        if not self.buffers or self.total is None:
            return
        parts = [self.total.parts[node] for node in exchange.nodes[exchange.rank]]
        empty = torch.cat([buffer.flatten() for buffer in self.buffers])
        mean = exchange.sum(parts or [empty]) / len(exchange.present)
        values = mean.split([buffer.numel() for buffer in self.buffers])
        for buffer, value, before in zip(self.buffers, values, self.before, strict=False):
            buffer.copy_(torch.where(torch.isfinite(value).all(), value.view_as(buffer), before))
