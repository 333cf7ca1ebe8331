"""BatchNorm: running statistics that belong to the shards, or layers that synchronise themselves over the ranks."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import LaunchError
from lockstep.runtime.exchange import Exchange
from lockstep.runtime.tree_reduce import TreeSum


def has_batchnorm(model: nn.Module) -> bool:
    """Whether any layer is a BatchNorm, synchronised or not."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise(model: nn.Module, device: torch.device) -> None:
    """Turn the model's BatchNorm layers into SyncBatchNorm, in place, under the same names and with the same numbers.

    On a CPU they stay: there SyncBatchNorm only evaluates, which BatchNorm does as well, and DDP refuses to take it.
    """
    if device.type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


def check_synchronised(device: torch.device, world_size: int, shares: Mapping[str, tuple[int, int]]) -> None:
    """Raise LaunchError where SyncBatchNorm cannot train.

    Every forward pass of such a layer waits for all ranks, and takes whatever they hold: a rank with fewer
    micro-batches would leave the others waiting, and one with a ghost would count samples twice. `shares`: which step
    -> (this rank's micro-batches, all ranks' together).
    """
    mend = "set train.batchnorm=shard, or launch.processes=1"
    if device.type == "cpu":
        raise LaunchError(
            f"train.batchnorm=sync: PyTorch's SyncBatchNorm runs on GPUs only, and here are {world_size} processes "
            f"without one; {mend}"
        )
    for step, (own, together) in shares.items():
        if own * world_size != together:
            raise LaunchError(
                f"train.batchnorm=sync: every process must have equally many micro-batches, but {step} has {together} "
                f"for {world_size} processes; let train.global_batch be a multiple of train.micro_batch times the "
                f"processes, and data.limit a multiple of train.global_batch; or {mend}"
            )


class RunningStatistics:
    """Every shard starts from the statistics of the step's start, and so leaves its own next ones behind; the mean
    of those, summed in the shards' tree, becomes the statistics after the step. A mean that is not finite leaves them
    as they were.

    Statistics of a batch itself stay those of the micro-batch, whatever the number of processes. SyncBatchNorm's are
    left alone: they advance as PyTorch advances them, with every micro-batch, and alike on every rank.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        norms = [
            m
            for m in modules
            if isinstance(m, _BatchNorm) and m.track_running_stats and not isinstance(m, nn.SyncBatchNorm)
        ]
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
            tensor.data.copy_(value)  # a backward pass that is still to come does not ask for them, but autograd would

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
        for counter, before in zip(self.counters, self.before[len(self.buffers) :], strict=True):
            counter.copy_(before + 1)  # however often a forward pass was repeated to save memory
