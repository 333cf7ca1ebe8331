"""BatchNorm with statistics over the micro-batches that all processes hold. Buffers of other BatchNorm layers are
handled in buffers.py.

m = samples of a micro-batch, C = channels.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.base.errors import LaunchError
from lockstep.core.distributed.process_group import further_group
from lockstep.core.host.activity import waiting_in


class SynchronisedBatchNorm(_BatchNorm):
    """PyTorch's SyncBatchNorm for a CPU, where PyTorch has none: from sums over all processes, whose gradients are sums
    over all processes, too. Slices may have different numbers of samples, or none.

    Source: S. Ioffe, C. Szegedy, Batch Normalization, 2015.
    """

    group: dist.ProcessGroup
    """Group of all processes, for this layer alone, since gradients are exchanged meanwhile."""

    def _check_input_dim(self, _: Tensor) -> None:
        """Take any number of dimensions, as SyncBatchNorm does."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (PyTorch's name)
        """[m, C, ...] -> the same shape. Raises ValueError where all processes together hold one value per channel."""
        if not self.training:
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(x.ndim) if dim != 1]
        values = x.new_full((1,), input.numel() / max(1, input.size(1)))
        mean, count = self._sums(x.sum(others), values)
        if float(count) <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        mean, count = mean / count, count.detach()
        shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        centred = x - mean.view(shape)
        variance = self._sums(centred.square().sum(others))[0] / count
        self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        found = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found.to(input.dtype)

    def _sums(self, *own: Tensor) -> list[Tensor]:
        """Sum flat tensors over all processes; gradients flow back through the sums."""
        with waiting_in("the statistics of BatchNorm"):
            return list(all_reduce(torch.cat(own), group=self.group).split([len(each) for each in own]))

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, as PyTorch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def is_synchronised(module: nn.Module) -> bool:
    """Return whether a layer's statistics, and so its buffers, are equal on all processes."""
    return isinstance(module, nn.SyncBatchNorm | SynchronisedBatchNorm)


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether any layer is a BatchNorm, synchronised or not."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise(model: nn.Module, device: torch.device) -> None:
    """Convert BatchNorm layers in place to statistics over all processes, with their names and values. Collective."""
    if device.type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif has_batchnorm(model):
        group = further_group()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.__class__ = SynchronisedBatchNorm  # with its parameters, buffers and hooks
                vars(module)["group"] = group


def check_synchronised(world_size: int, shares: Mapping[str, tuple[int, int]]) -> None:
    """Raise LaunchError where BatchNorm cannot be synchronised.

    Its forward pass is a collective over all ranks' micro-batches: a rank with fewer micro-batches would leave the
    others waiting, and one with a ghost would count samples twice. `shares`: description of a step -> (this rank's
    micro-batches, all ranks' together).
    """
    for step, (own, together) in shares.items():
        if own * world_size != together:
            raise LaunchError(
                f"train.batchnorm=sync: every process must have equally many micro-batches, but {step} has {together} "
                f"for {world_size} processes; let train.global_batch be a multiple of train.micro_batch times the "
                "processes, and data.limit a multiple of train.global_batch; or set train.batchnorm=shard, or "
                "launch.processes=1"
            )
