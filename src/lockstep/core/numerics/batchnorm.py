"""SyncBatchNorm: conversion and checks. Buffers of other BatchNorm layers are handled in buffers.py."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.base.errors import LaunchError


def has_batchnorm(model: nn.Module) -> bool:
    """Whether any layer is a BatchNorm, synchronised or not."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise(model: nn.Module, device: torch.device) -> None:
    """Convert the model's BatchNorm layers to SyncBatchNorm, in place, with the same names and values.

    Does nothing on a CPU, where SyncBatchNorm cannot train and DDP refuses it.
    """
    if device.type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


def check_synchronised(device: torch.device, world_size: int, shares: Mapping[str, tuple[int, int]]) -> None:
    """Raise LaunchError where SyncBatchNorm cannot train.

    Its forward pass is a collective over all ranks' micro-batches: a rank with fewer micro-batches would leave the
    others waiting, and one with a ghost would count samples twice. `shares`: description of a step -> (this rank's
    micro-batches, all ranks' together).
    """
    remedy = "set train.batchnorm=shard, or launch.processes=1"
    if device.type == "cpu":
        raise LaunchError(
            f"train.batchnorm=sync: PyTorch's SyncBatchNorm runs on GPUs only, and here are {world_size} processes "
            f"without one; {remedy}"
        )
    for step, (own, together) in shares.items():
        if own * world_size != together:
            raise LaunchError(
                f"train.batchnorm=sync: every process must have equally many micro-batches, but {step} has {together} "
                f"for {world_size} processes; let train.global_batch be a multiple of train.micro_batch times the "
                f"processes, and data.limit a multiple of train.global_batch; or {remedy}"
            )
