"""Settings of the training loop and of evaluation."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lockstep.base.config import MANY, Section
from lockstep.base.contracts import Format
from lockstep.checkpoint.metric_modes import Mode, without_sign


class TrainSection(Section):
    """How long to train, batch sizes and number format."""

    incidental: ClassVar[frozenset[str]] = frozenset(
        {"non_finite", "stop_metric", "stop_mode", "stop_patience", "max_minutes", "recompute", "loss_is"}
    )

    epochs: float | None = Field(None, gt=0, le=1e6)
    """Passes over the training samples; give this or `steps` (default: 1 epoch)."""
    steps: int | None = Field(None, ge=1, le=MANY)
    """Optimizer steps; give this or `epochs`."""
    global_batch: int = Field(64, ge=1, le=MANY)
    """G: samples per optimizer step, over all processes together; the number of processes never changes it."""
    micro_batch: int = Field(16, ge=1, le=MANY)
    """m: samples per forward and backward pass. On a GPU usually the largest that fits, on a CPU often fewer:
    `lockstep tune` finds it. Another one gives other weights."""
    precision: Format = "fp32"
    """fp32; on GPUs tf32, fp32 whose products and convolutions take rounded numbers (TF32), some times as fast; or
    autocast to bf16 or fp16 (fp16 with a gradient scaler)."""
    recompute: bool = False
    """Activation checkpointing: recompute the activations inside the model's blocks in the backward pass. The same
    weights with less memory, for about a third more time."""
    compile: bool = False
    """torch.compile for the model's blocks in training, each shape of inputs by itself, when it first occurs. Meant for
    GPUs, where it has not been run yet; on a CPU training was slower."""
    batchnorm: Literal["shard", "sync"] = "shard"
    """shard: each micro-batch is normalised by itself; sync: by what all processes hold (SyncBatchNorm); the
    weights then depend on the number of processes."""
    loss_is: Literal["sample_wise", "batch_wise"] = "sample_wise"
    """sample_wise: a sample's loss is its own; batch_wise: it depends on the others of its micro-batch by design, as a
    contrastive loss does. The weights are then the same on any number of processes at this micro_batch, not at
    another one."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """How much of a target's weight is spread evenly over all classes, in training but not in evaluations; e.g. 0.1."""
    class_weights: Literal["balanced"] | tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Weights of the classes in the loss of training, not of evaluations: a number for each, in the order of the
    labels, or balanced, in inverse proportion to their numbers of samples."""
    non_finite: Literal["stop", "skip", "continue"] = "stop"
    """Reaction to a loss that is NaN or infinite: stop and say where (noticed at the next logged step, before anything
    is saved), skip the update, or go on."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average (EMA) of the weights, which is then evaluated and exported; e.g. 0.999."""
    stop_metric: str | None = None
    """Early stopping: stop when this metric of the evaluation (such as loss, accuracy or rmse) has not improved ..."""
    stop_mode: Mode = "auto"
    """... (min: become smaller, max: larger; auto: as the metric or its name says) ..."""
    stop_patience: int = Field(3, ge=1, le=MANY)
    """... for this number of evaluations in a row."""

    max_minutes: float | None = Field(None, gt=0, le=MANY)
    """Time limit since the start: save a checkpoint before it and end with exit code 75; a new start resumes."""

    @model_validator(mode="before")
    @classmethod
    def _takes_the_sign(cls, section: Any) -> Any:
        return without_sign(section, "stop_metric", "stop_mode")

    @property
    def shards(self) -> int:
        """V: micro-batches per step."""
        return -(-self.global_batch // self.micro_batch)

    def total_steps(self, steps_per_epoch: int) -> int:
        return self.steps or max(1, round((self.epochs or 1) * steps_per_epoch))


class EvaluateSection(Section):
    """Evaluation on the test split (always once more at the end)."""

    every_steps: int | None = Field(None, ge=1, le=MANY)
    """Evaluate every N steps."""
    every_epochs: int | None = Field(1, ge=1, le=MANY)
    """Evaluate every N epochs."""
    micro_batch: int | None = Field(None, ge=1, le=MANY)
    """Samples per forward pass; empty for train.micro_batch."""
    limit: int | None = Field(None, ge=1, le=MANY)
    """Measure so many test samples while training, also at its end: always the same, spread evenly over the split;
    `lockstep evaluate` measures all. Empty: all."""
    sample_tokens: int = Field(100, ge=0, le=10_000)
    """Tokens that a language model adds to the beginnings of two test samples, to be read before training and after
    each evaluation; 0 for none."""
    metrics: Literal["auto"] | tuple[str, ...] = "auto"
    """Metrics reported besides the loss: names of metrics, and of sums returned with the loss; auto: all of them."""

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether to evaluate after step number `step` (counted from 1)."""
        by_step = self.every_steps is not None and step % self.every_steps == 0
        by_epoch = self.every_epochs is not None and step % (self.every_epochs * steps_per_epoch) == 0
        return by_step or by_epoch
