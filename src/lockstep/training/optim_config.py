"""Settings of the optimizer and the learning-rate schedule."""

from typing import Literal

from pydantic import Field, field_validator

from lockstep.base.config import MANY, Section


class OptimSection(Section):
    """How weights are updated."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """adamw (I. Loshchilov, F. Hutter, Decoupled Weight Decay Regularization, 2019) or sgd with momentum."""
    lr: float = Field(1e-3, gt=0, le=1e6)
    """Learning rate at the peak of the schedule, before the linear rule."""
    base_batch: int | None = Field(None, ge=1, le=MANY)
    """The global batch that `lr` was tuned for: the rate used is lr * global_batch / base_batch (the linear rule of
    P. Goyal et al., Accurate, Large Minibatch SGD, 2017). Leave empty to use `lr` as it is."""
    weight_decay: float = Field(0.01, ge=0, le=1e3)
    """Weight decay of matrices and kernels; norms and biases (1-dim tensors) are never decayed."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it. Empty for none."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd; beta 1 of adamw."""
    beta2: float = Field(0.999, gt=0, lt=1)
    """Beta 2 of adamw; sgd has none."""


class ScheduleSection(Section):
    """The learning rate over the run."""

    shape: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate from its peak to the end of the run: linear or cosine decay to 0, or constant."""
    warmup: float = Field(0.0, ge=0, le=MANY)
    """Linear warm-up at the start: a fraction of the run if below 1, else a number of steps."""

    @field_validator("warmup")
    @classmethod
    def _is_fraction_or_whole(cls, warmup: float) -> float:
        if warmup > 1 and not warmup.is_integer():
            raise ValueError("should be a fraction of the run, from 0 to 1, or a whole number of steps")
        return warmup

    def warmup_steps(self, total_steps: int) -> int:
        """Number of warm-up steps; if set as a number of steps, it may exceed the run."""
        return round(self.warmup * total_steps) if self.warmup < 1 else round(self.warmup)
