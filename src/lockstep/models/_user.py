"""The module of a user's Python file, with its loss."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import nn

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import Averaged, Batch, LossSum, Model, Outputs
from lockstep.core.modules.blocks import blocks_of
from lockstep.core.modules.buffer_rules import declare
from lockstep.core.modules.outputs import register
from lockstep.models._documents import keeps_apart, not_apart
from lockstep.models._own_functions import Loss, TermCounts, chosen_loss, is_function, summed, term_counts
from lockstep.models.objectives._choice import AUTO, objective_of
from lockstep.models.objectives._objective import Objective
from lockstep.models.user import Config

Derived = Callable[[Mapping[str, float]], Mapping[str, float]]


class UserModel(Model):
    """Adapter from a user's module (`network`) to Lockstep's Model."""

    def __init__(
        self,
        network: nn.Module,
        loss: Loss,
        *,
        term_counts: TermCounts | None = None,
        derived: Derived | None = None,
        objective: Objective | None = None,
    ) -> None:
        """`objective`: the one whose loss it is, if any."""
        super().__init__()
        self.network, self._loss, self.term_counts, self._derived = network, loss, term_counts, derived
        self.objective = objective

    def forward(self, batch: Batch) -> Outputs:
        """Call the module; returns a tensor or a pytree of tensors."""
        try:
            outputs = self.network(batch)
        except (AttributeError, KeyError, TypeError) as error:
            error.add_note(f"forward(batch) gets a dict of tensors, here with: {', '.join(batch)}")
            raise
        register(outputs)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Compute the module's loss, else the file's, else that of the objective. Raises ModelError."""
        return self._loss(outputs, batch)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return self._derived(means) if self._derived else {}

    def blocks(self) -> list[nn.Module]:
        return own_blocks(self.network)


def build(config: Config, spec: DataSpec) -> Model:
    """Call the file's `build`. Raises ModelError when it is missing or does not return a module."""
    module = plugins.load_file(config.file, "model.file")
    if not hasattr(module, "build"):
        raise ModelError(f"{config.file} has no function build(options, spec) that returns a torch module")
    network = module.build(config.options, spec)
    if not isinstance(network, nn.Module):
        raise ModelError(f"build() in {config.file} returned {type(network).__name__}, not a torch.nn.Module")
    network, compiled = uncompiled(network)
    if callable(getattr(module, "buffers", None)):
        declare(network, module.buffers(network))
    averages = averaged(network, module.averages(network)) if callable(getattr(module, "averages", None)) else ()
    loss, objective = chosen_loss(*(getattr(owner, "loss", None) for owner in (network, module))), objective_of(spec)
    counts = term_counts(network, module)
    model = UserModel(
        network,
        summed(loss or objective.loss, counts),
        term_counts=counts,
        derived=objective.derived if loss is None or spec.objective != AUTO else None,
        objective=objective if loss is None else None,
    )
    model._lockstep_averages = averages
    if compiled:
        model._lockstep_notes = (
            f"{few(compiled)} of {config.file} is trained without your torch.compile, whose code depends on how the "
            "model is divided among processes; train.compile=true compiles the model's blocks",
        )
    if spec.documents and spec.vocabulary and not keeps_apart(model, vocabulary=spec.vocabulary):
        raise not_apart(f"the model in {config.file}, which gets them as batch['document'],")
    return model


def uncompiled(network: nn.Module) -> tuple[nn.Module, list[str]]:
    """Undo torch.compile on a network and its parts -> the network, and the names of these parts."""
    root, names = nn.ModuleDict({"network": network}), list[str]()
    for prefix, parent in [*root.named_modules()]:
        for name, child in parent._modules.items():
            while child is not None and "_orig_mod" in child._modules:
                names.append(f"{prefix}.{name}".lstrip("."))
                parent._modules[name] = child = child._modules["_orig_mod"]
        if parent._compiled_call_impl is not None:  # of nn.Module.compile()
            parent._compiled_call_impl = None
            names.append(prefix)
    return root["network"], list(dict.fromkeys(names))


def averaged(network: nn.Module, rules: Any) -> tuple[Averaged, ...]:
    """Read what the file's `averages(module)` declares: {copy: (source, momentum[, every])}, names of modules or
    parameters. The copies are frozen. Raises ModelError."""
    parameters, found = dict(network.named_parameters()), []
    for copy, rule in dict(rules).items():
        if not isinstance(rule, tuple | list) or len(rule) not in (2, 3) or not 0 <= rule[1] <= 1:
            raise ModelError(f"averages(): {copy!r} needs (source, momentum) with a momentum of 0 to 1, not {rule!r}")
        numbers = [name for name, p in parameters.items() if p.is_floating_point() or p.is_complex()]
        names = [name for name in numbers if f"{name}.".startswith(f"{copy}.")]
        pairs = {name: rule[0] + name.removeprefix(copy) for name in names}
        if not pairs:
            raise ModelError(f"averages(): there is no parameter and no module with parameters named {copy!r}")
        for name, source in pairs.items():
            if source not in parameters or parameters[source].shape != parameters[name].shape:
                raise ModelError(f"averages(): {name} has no parameter {source} of its shape to follow")
            parameters[name].requires_grad = False
            own = {"copy": f"network.{name}", "source": f"network.{source}", "momentum": rule[1]}
            found.append(Averaged(**own, every=rule[2] if len(rule) > 2 else 1))
    return tuple(found)


def own_blocks(network: nn.Module) -> list[nn.Module]:
    """Split a network into blocks: what its method `blocks()` returns, if that is modules; else the entries of its
    attribute `blocks` (ModuleList or Sequential) and the modules beside it; else `blocks_of`."""
    own: Any = getattr(network, "blocks", None)
    if is_function(own, arguments=0):
        blocks = own()
        if isinstance(blocks, list | tuple | nn.ModuleList) and all(isinstance(block, nn.Module) for block in blocks):
            return list(dict.fromkeys(blocks))
    if isinstance(own, nn.Sequential):
        groups = [[*block] if block is own else [block] for block in blocks_of(network)]
        return list(dict.fromkeys(chain.from_iterable(groups)))
    return blocks_of(network)
