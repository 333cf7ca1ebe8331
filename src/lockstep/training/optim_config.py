"""Settings of the optimizer and the learning-rate schedule."""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from lockstep.base.config import MANY, LocalPath, Section
from lockstep.base.errors import nearest
from lockstep.base.name_patterns import Patterns

OWN = "user"
KINDS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd"),
    *("muon", "nadam", "radam", "rmsprop", "rprop", "sgd"),
)
"""The classes of torch.optim by lower-case name. Not LBFGS, which runs the model several times a step, and not
SparseAdam, since gradients here are dense."""
WHOLE_TENSORS = ("adafactor", "muon", OWN)
"""Optimizers that need whole parameters, not parts of them."""


def _known(kind: str, *, kinds: tuple[str, ...]) -> str:
    """Return a kind in lower case. Raises ValueError for an unknown one."""
    if kind.lower() not in kinds:
        raise ValueError(f"there is no {kind!r}{nearest(kind, list(kinds))} (there is: {', '.join(kinds)})")
    return kind.lower()


class GroupSection(Section):
    """Parameters with settings of their own."""

    match: Patterns = Field(min_length=1)
    """Names of parameters or of modules, or shell patterns of them, such as "*.bias"; of several groups that match a
    parameter, the first."""
    lr: float | None = Field(None, gt=0, le=1e6)
    """Learning rate at the peak, in place of optim.lr; the schedule and the linear rule apply to it, too."""
    weight_decay: float | None = Field(None, ge=0, le=1e3)
    """Weight decay of all that match, also of norms and biases."""
    kind: Annotated[str, AfterValidator(partial(_known, kinds=KINDS))] | None = None
    """Another optimizer, with its own defaults for everything but lr and weight_decay."""
    options: dict[str, Any] = {}
    """Further arguments of its class."""


class OptimSection(Section):
    """How weights are updated."""

    kind: Annotated[str, AfterValidator(partial(_known, kinds=(*KINDS, OWN)))] = "adamw"
    """adamw (I. Loshchilov, F. Hutter, Decoupled Weight Decay Regularization, 2019), sgd with momentum, or another
    class of torch.optim in lower case, such as adam, rmsprop or muon; user: that of a Python file."""
    lr: float = Field(1e-3, gt=0, le=1e6)
    """Learning rate at the peak of the schedule, before the linear rule."""
    base_batch: int | None = Field(None, ge=1, le=MANY)
    """The global batch that `lr` was tuned for: the rate used is lr * global_batch / base_batch (the linear rule of
    P. Goyal et al., Accurate, Large Minibatch SGD, 2017). Leave empty to use `lr` as it is."""
    weight_decay: float = Field(0.01, ge=0, le=1e3)
    """Weight decay of matrices and kernels; norms and biases (1-dim tensors) are never decayed, except by `groups`."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it. Empty for none."""
    clip_value: float | None = Field(None, gt=0)
    """Largest absolute value of each number in a gradient, after `clip`; larger ones are cut off. Empty for none."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd; beta 1 of adamw. Others take theirs from `options`."""
    beta2: float = Field(0.999, gt=0, lt=1)
    """Beta 2 of adamw; sgd has none."""
    options: dict[str, Any] = {}
    """Further arguments of the optimizer's class, such as {betas: [0.9, 0.95]} for adam, or of the file's function."""
    file: LocalPath | None = None
    """The Python file of kind user, with `optimizer(module, options)`, which returns a torch.optim.Optimizer; by
    default the model's."""
    groups: tuple[GroupSection, ...] = ()
    """Parameters with settings of their own: a list of {match, lr, weight_decay, kind, options}."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Layer-wise decay: each layer learns at this fraction of the rate of the one above it, and what lies below all
    layers at the lowest. Layers are the numbered modules, such as `layer.0` (K. Clark et al., ELECTRA, 2020)."""

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        if self.kind == OWN and (self.groups or self.layer_decay):
            raise ValueError("optimizer() in the user's file makes its own groups: leave out groups and layer_decay")
        if self.kind != OWN and self.file is not None:
            raise ValueError(f"file has the optimizer of kind=user, but kind is {self.kind}")
        return self

    @property
    def kinds(self) -> set[str]:
        return {self.kind, *(group.kind for group in self.groups if group.kind is not None)}


Shape = Literal["linear", "cosine", "constant", "polynomial", "wsd", "inverse_sqrt", "one_cycle", "user"]


class ScheduleSection(Section):
    """The learning rate over the run."""

    ENDLESS: ClassVar[frozenset[str]] = frozenset({"constant", "inverse_sqrt"})
    """Shapes that do not depend on the length of the run."""

    shape: Shape = "linear"
    """The learning rate from its peak to the end of the run: linear, cosine or polynomial decay; constant; wsd,
    constant with a decay at the end; inverse_sqrt, with the inverse square root of the step; one_cycle, up and down on
    cosines; user, the function `schedule` of a Python file."""
    warmup: float = Field(0.0, ge=0, le=MANY)
    """Linear warm-up at the start: a fraction of the run if below 1, else a number of steps; of one_cycle, its rise."""
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak; of shapes that decay to an end."""
    power: float = Field(2.0, gt=0, le=100)
    """Power of polynomial."""
    decay: float = Field(0.1, gt=0, le=MANY)
    """Length of the decay of wsd at the end, a fraction of the run if below 1, else a number of steps."""
    file: LocalPath | None = None
    """The Python file of shape user, with `schedule(step)` or `schedule(step, total_steps)`, which returns the fraction
    of the peak, step 0 being the first; by default the model's."""

    @field_validator("warmup", "decay")
    @classmethod
    def _is_fraction_or_whole(cls, length: float) -> float:
        if length > 1 and not length.is_integer():
            raise ValueError("should be a fraction of the run, from 0 to 1, or a whole number of steps")
        return length

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.shape == "one_cycle" and not self.warmup:
            raise ValueError("one_cycle rises first: set warmup to the length of the rise, such as 0.3")
        if self.shape == OWN and self.warmup:
            raise ValueError("schedule() in the user's file has the whole schedule: leave out warmup")
        if self.shape != OWN and self.file is not None:
            raise ValueError(f"file has the schedule of shape=user, but shape is {self.shape}")
        return self

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps; if set as a number of steps, it may exceed the run."""
        return _steps(self.warmup, total_steps)

    def decay_steps(self, total_steps: int) -> int:
        return max(1, _steps(self.decay, total_steps))

    @property
    def is_open_ended(self) -> bool:
        """Whether the run's length does not change the rates of its steps."""
        return self.shape in self.ENDLESS and not 0 < self.warmup < 1


def _steps(length: float, total_steps: int) -> int:
    return round(length * total_steps) if length < 1 else round(length)
