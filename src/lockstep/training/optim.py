"""The optimizer: a class of torch.optim or the user's own, several of them for several kinds of parameters.

Which of them updates a parameter, at which learning rate and weight decay, is in its rule.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base import plugins
from lockstep.base.errors import ConfigError, ModelError
from lockstep.base.name_patterns import matching
from lockstep.core.modules.weight_watch import made_late
from lockstep.core.numerics.seeds import generators_restored, seed_all
from lockstep.training.learning_rate import SCALE
from lockstep.training.loss_checks import generator_states
from lockstep.training.optim_config import GroupSection, OptimSection
from lockstep.training.optimizer_memory import give_zero_gradients, refuse_unsaved_memory

CLASSES: dict[str, type[Optimizer]] = {
    name.lower(): found for name, found in vars(torch.optim).items() if isinstance(found, type)
}
LANES = 32
"""Two-byte numbers in the widest vector register (AVX-512); a multiple of the lanes of any other type or CPU."""
STEP = "step"
"""Key of the optimizers' step counter, which has the same shape as a scalar parameter."""
MATRICES = "muon"
"""The kind that takes matrices only; embeddings and everything else go to `OTHERS`, as its authors say (K. Jordan et
al., Muon: An Optimizer for Hidden Layers in Neural Networks, 2024)."""
OTHERS = "adamw"
LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.)")
"""The name of a numbered module at the start of a parameter's."""


@dataclass(frozen=True)
class ParameterRule:
    kind: str
    section: OptimSection | GroupSection
    lr_scale: float
    """Learning rate as a multiple of the run's."""
    weight_decay: float

    @property
    def owner(self) -> tuple[str, int]:
        """Key of its optimizer, which parameters with the same key share."""
        return self.kind, id(self.section)


Rules = Mapping[str, ParameterRule]
"""Rule by the parameter's name; of tied parameters by each of their names."""


def rules_of(config: OptimSection, model: nn.Module) -> Rules:
    """Return the rules of a model's trained parameters, before a strategy splits them. Raises ConfigError for patterns
    that match nothing, and where there is nothing to train."""
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    if not parameters:
        raise ConfigError("there is nothing to train: the model has no parameters, or all are frozen (model.freeze)")
    names = [name for name, _ in model.named_parameters()]
    chosen: dict[str, GroupSection] = {}
    for number, group in reversed(list(enumerate(config.groups))):
        chosen |= dict.fromkeys(matching(group.match, names, setting=f"optim.groups.{number}.match"), group)
    first_name = {id(p): name for name, p in model.named_parameters()}
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heights = _layer_scales(config.layer_decay, names)
    rules = {}
    for name, p in parameters.items():
        own, first = chosen.get(first_name[id(p)]), first_name[id(p)]
        kind = (own.kind if own else None) or config.kind
        if kind == MATRICES and (p.ndim != 2 or id(p) in lookups):
            kind = OTHERS
        decay = config.weight_decay if p.ndim >= 2 else 0.0
        rules[name] = ParameterRule(
            kind=kind,
            section=own if own and (own.kind or own.options) else config,
            lr_scale=(own.lr / config.lr if own and own.lr else 1.0) * heights[first],
            weight_decay=own.weight_decay if own and own.weight_decay is not None else decay,
        )
    return rules


def _layer_scales(decay: float | None, names: Sequence[str]) -> dict[str, float]:
    """Return decay to the power of the number of layers above each parameter. Raises ConfigError without layers."""
    if decay is None:
        return dict.fromkeys(names, 1.0)
    found = [match[0] if (match := LAYER.match(name)) else None for name in names]
    layers = list(dict.fromkeys(layer for layer in found if layer))
    if not layers:
        raise ConfigError("optim.layer_decay: the model has no numbered modules, such as `layer.0`; use optim.groups")
    first = found.index(layers[0])
    top = len(layers) + 1
    heights = [1 + layers.index(layer) if layer else (0 if at < first else top) for at, layer in enumerate(found)]
    return {name: decay ** (top - height) for name, height in zip(names, heights, strict=True)}


class SeveralOptimizers(Optimizer):
    """Optimizers of one model, each with parameters of its own, stepped together."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 (as in torch)
        for part in self.parts:
            part.zero_grad(set_to_none)


def build(config: OptimSection, module: nn.Module, rules: Rules) -> Optimizer:
    """Build the optimizer of a placed module, whose results do not depend on how the parameters are sharded. `rules`:
    those of the whole model. Raises ConfigError for options that its class does not take."""
    members: dict[tuple[str, int], list[tuple[ParameterRule, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            if name not in rules:  # a strategy has run the model
                raise ModelError(made_late(name))
            members.setdefault(rules[name].owner, []).append((rules[name], parameter))
    parts = [_of_one_kind(config, own) for own in members.values()]
    for part in parts:
        if part.defaults.get("fused") and any(p.device.type == "cpu" for p in module.parameters()):
            FusedTails(part)
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)


def _of_one_kind(config: OptimSection, members: list[tuple[ParameterRule, nn.Parameter]]) -> Optimizer:
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for rule, parameter in members:
        groups.setdefault((rule.lr_scale, rule.weight_decay), []).append(parameter)
    made = CLASSES[members[0][0].kind]
    takes_decay = "weight_decay" in inspect.signature(made).parameters
    return made(
        [
            {"params": own, "lr": config.lr * scale, SCALE: scale, **({"weight_decay": decay} if takes_decay else {})}
            for (scale, decay), own in groups.items()
        ],
        **_arguments(members[0][0], config, members[0][1].device),
    )


def _arguments(rule: ParameterRule, config: OptimSection, device: torch.device) -> dict[str, Any]:
    """Return further arguments of the optimizer's class. Raises ConfigError for those that it does not take."""
    known = inspect.signature(CLASSES[rule.kind]).parameters
    own = rule.section is not config and rule.section.kind is not None
    is_unfused = rule.kind == "adagrad" and device.type == "cuda" and torch.__version__ < "2.12"  # compared as versions
    made: dict[str, Any] = {"fused": True} if "fused" in known and not is_unfused else {}
    if rule.kind == MATRICES:
        made["adjust_lr_fn"] = "match_rms_adamw"  # so that one learning rate suits all parameters
    if rule.kind == "sgd" and not own:
        made["momentum"] = config.momentum
    if rule.kind == "adamw" and not own:
        made["betas"] = (config.momentum, config.beta2)
    given = {} if own or rule.kind != config.kind else dict(config.options)
    if rule.kind == (rule.section.kind or config.kind):
        given |= rule.section.options
    taken = [name for name in known if name not in ("params", "lr", "weight_decay")]
    if unknown := sorted(given.keys() - set(taken)):
        raise ConfigError(f"optim: {rule.kind} has no option {unknown[0]!r} (it has: {', '.join(taken)})")
    made |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        CLASSES[rule.kind]([nn.Parameter(torch.zeros(1, 1))], **made)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optim: {rule.kind} does not take these options: {error}") from None
    return made


def build_own(config: OptimSection, module: nn.Module, model_file: Path | None) -> Optimizer:
    """Call the user's `optimizer(module, options)`. Raises ConfigError where it is missing or returns another thing."""
    setting, file = ("optim.file", config.file) if config.file else ("model.file", model_file)
    if file is None:
        raise ConfigError("optim.kind=user needs optim.file: the Python file with optimizer(module, options)")
    function = getattr(plugins.load_file(file, setting), "optimizer", None)
    if not callable(function):
        raise ConfigError(f"{file} has no function optimizer(module, options) that returns a torch.optim.Optimizer")
    optimizer = function(module, config.options)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer() in {file} returned {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(f"optimizer() in {file} returned LBFGS, which runs the model more than once in a step")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if left := [name for name, p in module.named_parameters() if p.requires_grad and p not in held]:
        raise ConfigError(f"optimizer() in {file} leaves out {left[0]}: give it all trained parameters, or freeze some")
    if other := held - {*module.parameters()}:
        what = f"optimizer() in {file} has a parameter of shape {list(other.pop().shape)} that is not the model's"
        raise ConfigError(f"{what}: make it one of the model's, else no checkpoint has it, and each process another")
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])  # also of one that is a tensor
        group[SCALE] = group["lr"] / config.lr
    return optimizer


def initialise(module: nn.Module, optimizer: Optimizer, *, is_split: bool = False) -> None:
    """Create the optimizer's state (moments, momentum) of every parameter before the first step.

    The first step would leave it out for unused parameters, and the fused SGD on a CPU would leave it uninitialised
    when that step's fp16 gradients overflow. `is_split`: whether other ranks have other parameters, or parts of them.
    Raises ConfigError for state that a checkpoint would not hold, and for random numbers where parameters are split.
    """
    give_zero_gradients(optimizer)
    for part in optimizer.parts if isinstance(optimizer, SeveralOptimizers) else [optimizer]:
        if type(part) not in CLASSES.values() or isinstance(part, torch.optim.SGD):
            refuse_unsaved_memory(part, _step_without_effect, saves_groups=False)
            with generators_restored():
                seed_all(0)
                before = generator_states()
                _step_without_effect(part)
                draws = generator_states() != before
            if draws and is_split:
                what = (
                    f"{type(part).__name__} draws random numbers, and would draw others for other parts of the weights"
                )
                raise ConfigError(f"optim: {what}: it runs under parallel.kind=ddp and single only")
            continue
        create: Any = part._init_group  # type: ignore[attr-defined]  # each step of a class of torch.optim begins with it
        lists = len(inspect.signature(create).parameters) - 1
        for group in part.param_groups:
            create(group, *([] for _ in range(lists)))
    optimizer.zero_grad(set_to_none=True)


def _step_without_effect(optimizer: Optimizer) -> None:
    """Run a step at learning rate 0 with gradients of 0, and reset the count of steps. Raises ConfigError."""
    before = [_scalars(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = old["lr"]
    states = list(optimizer.state.values())
    others = {name for state in states for name, value in state.items() if not isinstance(value, Tensor | None)}
    changed = {
        name
        for group, old in zip(optimizer.param_groups, before, strict=True)
        for name, value in _scalars(group).items()
        if old.get(name) != value
    }
    if unsaved := sorted(others | changed):
        what = f"{type(optimizer).__name__} keeps {unsaved[0]!r} as a Python number, which no checkpoint holds"
        raise ConfigError(f"{what}: keep it as a tensor in the state of each parameter")
    for state in states:
        for name, value in state.items():
            if isinstance(value, Tensor) and (name == "step" or isinstance(optimizer, torch.optim.SGD)):
                value.zero_()


def _scalars(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if isinstance(value, int | float | None)}


class FusedTails:
    """Hooks that recompute the tail of every tensor, the elements that do not fill a vector register.

    The fused CPU kernels process full registers with vector instructions and the tail with scalar ones, which may round
    differently (AdamW and SGD of torch 2.13: 2 of 10,000 elements). The bits would depend on where a shard ends, and so
    on the number of processes. A second optimizer of the same class therefore updates each tail again, padded with
    zeros to a full register. The unfused AdamW rounds consistently, but takes 6 times as long.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [
            {**group, "params": [torch.nn.Parameter(p.new_zeros(LANES)) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        registers = [q for group in groups for q in group["params"]]
        self.pairs = [(p, q) for p, q in zip(originals, registers, strict=True) if p.numel() % LANES]
        self.tail_optimizer: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
        self.updated: list[tuple[Tensor, Tensor]] = []
        """(tail, register with its new values) of the current step."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        """Copy the tails into registers and update them, before the optimizer's own step."""
        self.updated = []
        for own_group, group in zip(self.tail_optimizer.param_groups, optimizer.param_groups, strict=True):
            own_group["lr"] = group["lr"]
        for parameter, register in self.pairs:
            state = optimizer.state.get(parameter)
            register.grad = None
            if parameter.grad is None or not state:  # the first step, without effect, creates the state
                continue
            register.grad = torch.zeros_like(register)
            register_state = self.tail_optimizer.state[register]
            tensors = [(parameter, register), (parameter.grad, register.grad)]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and key != STEP:
                    tensors.append((value, register_state.setdefault(key, torch.zeros_like(register))))
                else:
                    register_state[key] = value.clone() if isinstance(value, Tensor) else value
            pairs = [(_tail(whole), padded.detach()[: parameter.numel() % LANES]) for whole, padded in tensors]
            torch._foreach_copy_([padded for _, padded in pairs], [tail for tail, _ in pairs])
            self.updated += [pairs[0], *pairs[2:]]
        for name in ("grad_scale", "found_inf"):  # set by a gradient scaler for this step
            setattr(self.tail_optimizer, name, getattr(optimizer, name, None))
        self.tail_optimizer.step()

    def _after(self, *_: Any) -> None:
        if self.updated:
            torch._foreach_copy_([tail for tail, _ in self.updated], [padded for _, padded in self.updated])


def _tail(tensor: Tensor) -> Tensor:
    """View of the last elements of a dense tensor, in memory order, that do not fill a register."""
    size = tensor.numel() % LANES
    return tensor.detach().as_strided((size,), (1,), tensor.storage_offset() + tensor.numel() - size)
