"""Everything that changes during training and is stored in a checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Averaged, Batch, LossSum, MicroBatch, Strategy
from lockstep.core.modules.dtensors import local_tensor
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.observe.diagnose.spikes import Spikes


class MovingAverage:
    """Moving average of the weights, used in their place for evaluation and export: average = decay * average + (1 -
    decay) * weights, after every step; buffers are not averaged.

    Source: B. Polyak, A. Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        # whole numbers, such as indices, stay as they are
        self.weights = {name: p for name, p in module.named_parameters() if p.is_floating_point() or p.is_complex()}
        self.average = {name: p.detach().clone() for name, p in self.weights.items()}
        self._update = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        self._update(list(self.average.values()), [p.detach() for p in self.weights.values()], None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the module; swap back afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for name, parameter in self.weights.items():
                weights = parameter.detach().clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(weights)


@dataclass(kw_only=True)
class BestSoFar:
    best: float | None = None
    evaluations_since: int = 0


@dataclass(kw_only=True)
class TrainState:
    """Weights, optimizer state and counters; data position and random seeds follow from `step`."""

    strategy: Strategy
    module: nn.Module
    """Result of Strategy.place: this rank's parameters, under canonical names."""
    optimizer: torch.optim.Optimizer
    precision: Precision
    rate: Callable[[int], float] | None
    """Step -> learning rate; None where the rates of the parameter groups are set elsewhere."""
    clip_value: float | None = None
    """Largest absolute value of each number in a gradient."""
    randomness: Randomness | None = None
    term_counts: Callable[[Batch], Mapping[str, float]] | None = None
    """Model.term_counts: the count of each term of the loss in a batch; None for a loss without terms."""
    ema: MovingAverage | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> the step from which it is trained; until then its gradients are dropped."""
    copies: Sequence[tuple[Averaged, Tensor, Tensor]] = ()
    """This rank's parameters that follow others: how, the copy, the source."""
    confirm: Callable[[], None] | None = None
    """Collective of live recovery by ranks that hold the state together; ends once the gradients of a step are complete
    on all ranks. After it each rank can apply them by itself, so that none has to stay a step behind."""
    recheck: Callable[[Sequence[MicroBatch]], LossSum] | None = None
    """Runs a step in the strategy's place, and some steps more than once (observe.recheck)."""
    ready_step: Callable[[], Any] | None = None
    """Applies the gradients and returns the step's Outcome; set while a rank is in `confirm`."""
    is_applying: bool = False
    """Whether weights and optimizer are being changed: an error meanwhile leaves them between two steps."""
    step: int = 0
    """Finished steps."""
    rate_factor: float = 1.0
    """Factor of the learning rate that observers have requested."""
    is_stopped: bool = False
    """Whether an observer has ended the training."""
    skipped: int = 0
    """Steps without an update, since the loss was not finite or its count was 0."""
    chain: str = ""
    """Digest over every step that was read from the device; a save reads all of them first."""
    spikes: Spikes = field(default_factory=Spikes)
    """Looks at the same steps as the chain."""
    drift: list[dict[str, Any]] = field(default_factory=list)
    """Numeric settings that were changed on a resume (--allow-drift): step, field, before, now."""
    stopping: BestSoFar = field(default_factory=BestSoFar)
    saving: BestSoFar = field(default_factory=BestSoFar)
    parent: Mapping[str, Any] | None = None
    """Checkpoint at which the run was forked: run, step, digest of the weights."""

    def seed(self, place: str) -> None:
        """Seed what is drawn at a place of the current step that is in no micro-batch."""
        if self.randomness is not None:
            self.randomness.between(self.step, place)

    def held_parameters(self) -> list[Tensor]:
        """Return the parameters that have a gradient, but are not trained yet."""
        if all(self.step >= first for first in self.held.values()):
            return []
        named = self.module.named_parameters()
        return [p for name, p in named if self.step < self.held.get(name, 0) and p.grad is not None]

    def update_copies(self) -> None:
        """Update the copies, after the optimizer, in a step that has not been counted yet."""
        for each, copy, source in self.copies:
            if (self.step + 1) % each.every == 0:
                get_ema_multi_avg_fn(each.momentum)([copy], [source], None)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, or its shard on this rank, by canonical name: model.*, ema.*, optimizer.PARAMETER.*. Not
        copies: a checkpoint is loaded into them."""
        sharded, optimized = self.strategy.sharded, self.optimizer.state
        return {
            **{f"model.{name}": tensor for name, tensor in self.strategy.state().items()},
            **{f"ema.{name}": sharded(name, tensor) for name, tensor in self._average().items()},
            **{
                f"optimizer.{name}.{key}": sharded(name, value) if value.shape == parameter.shape else value
                for name, parameter in self.module.named_parameters()  # DCP's names, in a tenth of its time
                for key, value in optimized.get(parameter, {}).items()
                if isinstance(value, Tensor)
            },
        }

    def used(self) -> dict[str, str]:
        """Return the weights and buffers to evaluate and export: name in the model -> name in `tensors`. With an EMA,
        each parameter's average takes its place, under every name of a tied parameter."""
        state = self.strategy.state()
        averaged = {_memory(state[name]): name for name in self._average()}
        return {
            name: f"ema.{averaged[_memory(tensor)]}" if _memory(tensor) in averaged else f"model.{name}"
            for name, tensor in state.items()
        }

    def _average(self) -> dict[str, Tensor]:
        return self.ema.average if self.ema else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what is not a tensor, for the checkpoint's manifest."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "rate_factor": self.rate_factor,
            "is_stopped": self.is_stopped,
            "chain": self.chain,
            "spikes": self.spikes.state_dict(),
            "drift": list(self.drift),
            "scaler": self.precision.state_dict(),
            "stopping": vars(self.stopping).copy(),
            "saving": vars(self.saving).copy(),
            **({"parent": self.parent} if self.parent else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.skipped = state["step"], state["skipped"]
        self.rate_factor, self.is_stopped = state["rate_factor"], state["is_stopped"]
        self.chain, self.drift = state["chain"], list(state["drift"])
        self.spikes = Spikes(**state["spikes"])
        self.precision.load_state_dict(state["scaler"])
        self.parent = state.get("parent")
        self.stopping, self.saving = BestSoFar(**state["stopping"]), BestSoFar(**state["saving"])

    def decisions(self) -> dict[str, Any]:
        """Return copies of what is decided after a step."""
        best = {"stopping": replace(self.stopping), "saving": replace(self.saving)}
        return {"rate_factor": self.rate_factor, "is_stopped": self.is_stopped, **best}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Set what `decisions` returned."""
        for name, value in decisions.items():
            setattr(self, name, value)

    @contextmanager
    def for_use(self) -> Iterator[None]:
        """Switch to evaluation mode and, if there is one, to the EMA of the weights; switch back afterwards."""
        self.module.eval()
        try:
            with nullcontext() if self.ema is None else self.ema.in_place():
                yield
        finally:
            self.module.train()


def copies_of(module: nn.Module, averages: Sequence[Averaged]) -> list[tuple[Averaged, Tensor, Tensor]]:
    """Return the copies that this rank holds. Raises ModelError where it holds only one of a copy and its source."""
    own = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for each in averages:
        held = [own[name].shape for name in (each.copy, each.source) if name in own]
        if len(held) == 1 or len(set(held)) > 1:
            what = f"averages(): {each.copy} and {each.source} are not on the same process in the same parts"
            raise ModelError(f"{what}, as parallel.kind=pipeline or tensor splits the model: use ddp or fsdp")
    return [(each, own[each.copy], own[each.source]) for each in averages if each.copy in own]


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return a key that tied weights share."""
    return local_tensor(tensor).data_ptr(), tensor.shape
