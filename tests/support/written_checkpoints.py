"""Checkpoints written by ranks of the test pool."""

import torch

from lockstep.checkpoint.layout import Manifest
from lockstep.checkpoint.writer import Writer


def save(root, tensors, manifest):
    """Write a checkpoint and wait for it -> how it ended."""
    writer = Writer(root)
    writer.start(tensors, manifest)
    return writer.finished()


def manifest_of(step, **metrics):
    return Manifest(
        step=step,
        epoch=1,
        world_size=2,
        saved_at=1e9 + 3600 * step,
        numeric={"run.seed": 0, "optim.lr": 0.001, "data.names": ["caf\u00e9", "b"]},
        progress={"step": step, "saving": {"best": float("nan")}},
        metrics=metrics,
    )


def tensors_of(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(8, 16, generator=generator),
        "model.bias": torch.randn(8, generator=generator),
        "model.counter": torch.tensor(step),
        "optimizer.weight.exp_avg": torch.randn(8, 16, generator=generator).to(torch.bfloat16),
    }


def save_all(root, steps, metrics):
    for step, values in zip(steps, metrics, strict=True):
        save(root, tensors_of(step), manifest_of(step, **values))


def names(root):
    return sorted(path.name for path in root.iterdir())


def step_names(*steps):
    return [f"step-{step:09}" for step in steps]
