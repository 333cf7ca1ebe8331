"""Base class of strategies that shard the model, `fsdp`, `pipeline` and `tensor`, and their forward passes in turns."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model, Outputs
from lockstep.core.distributed.collectives import broadcast_object, raise_on_all_ranks
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.dtensors import first_names, persistent_buffers, sharded_like
from lockstep.core.modules.outputs import widened
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness, generators, set_generators
from lockstep.core.reduction.gradient_norm import NO_ROWS, ShardedNorm
from lockstep.parallel.micro_batches import MicroBatches


class Sharded:
    """Evaluation, clipping and state of a model that is sharded over the ranks."""

    outputs: Callable[[Batch], Outputs]
    """The model's outputs; a collective."""
    parameters: dict[str, Tensor]
    """This rank's parameters by their first name, DTensors where they are sharded."""
    local: dict[str, torch.nn.Parameter]
    """Local tensors of `parameters`, which this rank optimises."""
    passes: MicroBatches
    sharded_norm: ShardedNorm
    touched_rows: Mapping[Tensor, Tensor] = NO_ROWS

    def __init__(self, randomness: Randomness, precision: Precision) -> None:
        self.randomness, self.precision, self.device = randomness, precision, precision.device
        self.copies: tuple[int, ...] = ()
        self.placed: Model | None = None

    def start_placing(self, model: Model) -> None:
        """Store a model's names of parameters and buffers, before it is sharded."""
        if self.placed is model:
            raise RuntimeError("a model that is spread already cannot be placed again: build it anew")
        self.model = self.placed = model
        with raise_on_all_ranks():
            _refuse_hooks(model)
        self.names, self.buffers = first_names(model), persistent_buffers(model)

    @property
    def buffer_updates(self) -> Sequence[BufferUpdates]:
        return [self.passes.buffers]

    def forward(self, batch: Batch) -> Outputs:
        """Return the outputs, without gradients; fp32 where autocast gave half precision."""
        with torch.no_grad(), self.precision.autocast():
            return widened(self.outputs(batch))

    def norm(self) -> Tensor:
        return self.sharded_norm.global_norm(self.local)

    def state(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers by name, DTensors where they are sharded."""
        weights = {name: self.parameters[first] for name, first in self.names.items() if first in self.parameters}
        return {**weights, **{name: b for name, b in self.model.named_buffers() if name in self.buffers}}

    def sharded(self, name: str, part: Tensor) -> Tensor:
        return sharded_like(self.parameters[name], part)


def _refuse_hooks(model: Model) -> None:
    """Raise ModelError for hooks of parameters: sharded parameters are others, which would not have them."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            hook = "a hook for its gradient (register_hook or register_post_accumulate_grad_hook)"
            what = f"the parameter {name} has {hook}, which it would lose where the model is sharded"
            raise ModelError(f"{what}: use parallel.kind=ddp")


def round_robin_forward(
    batch: Batch, run: Callable[[Batch, int], Outputs | None], *, group: dist.ProcessGroup, device: torch.device
) -> Outputs:
    """Return the outputs of `run(batch, rank)` for this rank's batch. A collective: every rank of the group runs the
    batches of all; `run` may return None for those of other ranks. Random numbers are drawn as if each rank had run its
    own batch alone: its generator states are sent with it."""
    own, after = None, generators()
    sent = {name: column.cpu() for name, column in batch.items()}, after
    for rank in range(group.size()):
        received, states = broadcast_object(sent, group, source=rank)
        set_generators(states)
        outputs = run({name: column.to(device) for name, column in received.items()}, rank)
        if rank == group.rank():
            own, after = outputs, generators()
    assert own is not None
    set_generators(after)
    return own
