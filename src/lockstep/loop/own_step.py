"""One optimizer step of a script's own loop: its micro-batches, their backward passes, and the update at the end.

Uses of the model or the optimizer in another place are detected before they change the bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.host.phases import phase
from lockstep.core.numerics.loss import checked
from lockstep.parallel.replicated import Stepwise
from lockstep.training.step import Outcome

MEAN = 1
"""PyTorch's number for reduction="mean", which its losses keep for their backward passes."""
SUMS = ("Add", "Sub", "Squeeze", "Unsqueeze", "View", "Reshape", "ToCopy")
"""Operations behind which a mean is still a mean."""
CLIPPING = ("_get_total_norm", "_group_tensors_by_device_and_dtype")
"""Functions of torch.nn.utils.clip_grad that clip_grad_norm_ and clip_grad_value_ call with the gradients, however a
script has imported these."""
Place = Literal["between", "micro-batch", "backward", "update"]
"""Position of the script: between two steps, in a micro-batch, in step.backward, in the update of the weights."""


def trained_names(parameters: Mapping[str, Tensor]) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter.requires_grad]


class ScriptGuard:
    """Watches a model and an optimizer by hooks until `remove`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.place: Place = "between"
        self.parameters = dict(model.named_parameters())
        self.watched, self.trained = set[str](), trained_names(self.parameters)
        self.hooks: list[Any] = [model.register_forward_pre_hook(self._check_forward)]
        self.hooks.append(optimizer.register_step_pre_hook(self._check_update))
        self.clipping = {name: getattr(clip_grad, name) for name in CLIPPING}
        """Functions of torch in whose place it has put its own."""
        for name, function in self.clipping.items():
            setattr(clip_grad, name, partial(self._check_clipping, function))
        self._watch()

    def remove(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()
        for name, function in self.clipping.items():
            setattr(clip_grad, name, function)

    @contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def start_step(self, place: Callable[[], None]) -> None:
        """Have the model placed again where the script has changed what is trained, on all ranks. Raises ModelError."""
        names = trained_names(self.parameters)
        if names == self.trained:
            return
        if any(others != names for others in all_gather_object(names)):
            raise ModelError("requires_grad of a parameter differs between the processes: change it on all of them")
        place()
        self.trained = names
        self._watch()

    def _watch(self) -> None:
        for name in self.trained:
            if name not in self.watched:
                self.watched.add(name)
                self.hooks.append(self.parameters[name].register_post_accumulate_grad_hook(self._check_backward))

    def end_step(self) -> None:
        """Raise ModelError where other parameters are trained than at the start of the step."""
        if trained_names(self.parameters) != self.trained:
            raise ModelError(
                "requires_grad of a parameter was changed inside of `for ... in step`: change it before that, on all "
                "processes in the same step"
            )

    def _check_forward(self, model: nn.Module, _: Any) -> None:
        if self.place == "between" and model.training and torch.is_grad_enabled():
            raise ModelError(
                "the model is called in training mode outside of `for ... in step`: its random numbers and buffers "
                "would depend on the number of processes. Call it inside, or measure with loop.evaluate, or use "
                "model.eval() and torch.no_grad()"
            )

    def _check_backward(self, _: Tensor) -> None:
        if self.place != "backward":
            raise ModelError("gradients have come by loss.backward(): write step.backward(loss)")

    def _check_update(self, *_: Any) -> None:
        if self.place != "update":
            raise ModelError("remove optimizer.step(): the weights are updated at the end of `for ... in step`")

    def _check_clipping(self, function: Callable[..., Any], gradients: Sequence[Any], /, *args: Any, **kw: Any) -> Any:
        if not any(isinstance(each, Tensor) or each for each in gradients):  # which would be clipped by nobody
            raise ModelError(
                "remove the clipping of gradients, which finds none: those of all processes are added and clipped at "
                "the end of `for ... in step`, with lockstep.Loop(clip=...)"
            )
        return function(gradients, *args, **kw)


class OwnStep:
    """A step of `lockstep.Loop`: iterate over it for the micro-batches of this process, and call `backward` for each.
    At the end of the iteration the gradients of all processes are added and the weights are updated."""

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        epoch: int,
        ends_epoch: bool,
        strategy: Stepwise,
        guard: ScriptGuard,
        begin: Callable[[], None],
        commit: Callable[[LossSum], Outcome],
    ) -> None:
        self.number = micro_batches[0].step
        """Number of the step, from 0, over the whole run."""
        self.epoch = epoch
        """Number of the epoch, from 0."""
        self.ends_epoch = ends_epoch
        """Whether every sample has been seen once more after it."""
        self.outcome: Outcome | None = None
        self._micro_batches, self._strategy, self._guard = micro_batches, strategy, guard
        self._begin, self._commit = begin, commit
        self._current: MicroBatch | None = None
        self._losses: list[tuple[MicroBatch, LossSum]] = []
        self._is_started = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of this process, as the collate function made them, on its device: perhaps none,
        where there are fewer micro-batches than processes."""
        if self._is_started:
            raise ModelError(f"step {self.number} has been iterated over before: each step is run once")
        self._is_started = True
        first = self._micro_batches[0]
        self._begin()
        self._strategy.start_step(first)
        for micro_batch in self._micro_batches:
            if micro_batch.ghost:
                continue
            self._strategy.start(micro_batch)
            self._current = micro_batch
            with phase("forward"), self._guard.inside("micro-batch"):
                yield micro_batch.batch
            if self._current is not None:
                raise ModelError(
                    f"micro-batch {micro_batch.shard} of step {self.number} had no step.backward(loss): call it for "
                    "every micro-batch; for one that is to count nothing, step.backward(0 * loss, count=0)"
                )
        self._guard.end_step()
        self.outcome = self._commit(self._strategy.end_step(first, self._losses))

    def backward(self, loss: Tensor, *, count: Tensor | int | None = None) -> None:
        """Run the backward pass of this micro-batch. `loss` is the sum of the losses of its samples, not their mean;
        `count`: how many it is the sum of, such as tokens, if these are not its samples. Raises ModelError."""
        micro_batch = self._current
        if micro_batch is None:
            raise ModelError("step.backward(loss) is called once for each micro-batch, inside of `for ... in step`")
        self._check(loss)
        counted: Any = float(count) if isinstance(count, Real) else count  # also of numpy
        result = checked(LossSum(loss, len(micro_batch.indices) if counted is None else counted))
        with self._guard.inside("backward"):
            self._strategy.backward(result)
        self._losses.append((micro_batch, LossSum(result.total.detach(), result.count)))
        self._current = None

    @property
    def loss(self) -> float:
        """The mean loss of the whole global batch. Reading it waits for the device."""
        return float(self._done.mean(self._done.loss.total))

    @property
    def gradient_norm(self) -> float:
        """Gradient norm before clipping. Reading it waits for the device."""
        return float(self._done.norm)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the update: that of the first parameter group."""
        return self._done.rate

    @property
    def count(self) -> int:
        """The samples, or what else was counted, of the whole global batch."""
        return int(self._done.loss.count)

    @property
    def _done(self) -> Outcome:
        if self.outcome is None:
            raise ModelError("a step has a loss once `for ... in step` has ended")
        return self.outcome

    def _check(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ModelError(f"step.backward takes the sum of the losses, a tensor of one number; this is {what}")
        if not loss.requires_grad:
            raise ModelError("the loss does not depend on any trained weight: was it detached, or made by no_grad()?")
        if is_mean(loss):
            raise ModelError(
                'the loss is the mean of the micro-batch: give its sum, as with reduction="sum". Lockstep divides '
                "once, by the number of all samples of the step; a mean would count those of a small micro-batch more"
            )


def is_mean(loss: Tensor) -> bool:
    """Return whether a mean is the last operation of a loss, or a summand of it, as far as autograd's graph tells."""
    nodes: list[torch.autograd.graph.Node | None] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name().startswith("Mean") or getattr(node, "_saved_reduction", None) == MEAN:
            return True
        if node.name().startswith(SUMS):
            nodes += [each for each, _ in node.next_functions]
    return False
