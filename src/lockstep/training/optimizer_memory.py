"""Check whether an optimizer that is not one of torch.optim has state that no checkpoint holds.

Two small copies of it are compared: one that goes on after some steps, and one that is made anew and takes what a
checkpoint would hold. They own a few elements of a few parameters, and their steps change nothing else.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.errors import ConfigError, LockstepError
from lockstep.core.numerics.seeds import generators_restored

STEPS = 113
"""Number of steps before the comparison begins, and after: more than the period of most optimizers that do something
every few steps, such as Lookahead's 5 or 10, or the 100 of a preconditioner; a prime, so no multiple of any period."""
MEMBERS = 2
"""Parameters of each group in a copy."""
WIDTH = 4
"""Elements of a parameter along each axis in a copy."""


def refuse_unsaved_memory(optimizer: Optimizer, prepare: Callable[[Optimizer], None], *, saves_groups: bool) -> None:
    """Raise ConfigError where a resumed optimizer would go on otherwise than one that was not interrupted. Call it
    before the optimizer's first step.

    `prepare`: what is done with a new optimizer, after zero gradients, before a checkpoint is loaded; `saves_groups`:
    whether checkpoints hold its groups' options. It is not checked where its copy cannot be made or run.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    with generators_restored():
        try:
            running, resumed = _small_copy(optimizer), _small_copy(optimizer)
            for each in (running, resumed):
                give_zero_gradients(each)
                prepare(each)
            _run(running, keeps_rates=saves_groups)
            _load(running, resumed, saves_groups=saves_groups)
            _run(running, keeps_rates=saves_groups)
            _run(resumed, keeps_rates=saves_groups)
        except LockstepError:
            raise
        except Exception:  # such as one that needs the whole of its parameters
            return
    pairs = zip(_parameters(running), _parameters(resumed), strict=True)
    if all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        return
    raise ConfigError(
        f"{type(optimizer).__name__} remembers something that no checkpoint holds{_suspects(running, resumed)}: a run "
        "that is resumed would end with other weights. Keep it in self.state[parameter], as tensors that its first "
        "step makes"
    )


def give_zero_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of all trained parameters of an optimizer to zero."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def _small_copy(optimizer: Optimizer) -> Any:
    """Copy a few of its parameters and its attributes, not by deepcopy alone: torch leaves out attributes."""
    small = {id(p): _part(p) for group in optimizer.param_groups for p in group["params"]}
    made = object.__new__(type(optimizer))
    vars(made).update(copy.deepcopy({name: each for name, each in vars(optimizer).items() if name != "step"}, small))
    for group in made.param_groups:
        del group["params"][MEMBERS:]
    return made


def _part(parameter: Tensor) -> nn.Parameter:
    part = parameter.detach()[tuple(slice(WIDTH) for _ in parameter.shape)].clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def _run(optimizer: Optimizer, *, keeps_rates: bool) -> None:
    """Run STEPS steps with the same gradients and random numbers each time; at one rate, unless it `keeps_rates`."""
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.manual_seed(0)
    for _ in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = group["lr"] if keeps_rates else rate
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def _load(saved: Optimizer, into: Optimizer, *, saves_groups: bool) -> None:
    """Do as a resume does with a checkpoint of `saved`."""
    for old, new in zip(saved.param_groups, into.param_groups, strict=True):
        for name in old if saves_groups else ():
            if name != "params":
                new[name] = copy.deepcopy(old[name])
        for source, target in zip(old["params"], new["params"], strict=True):
            target.data.copy_(source)
            state = into.state[target]
            for name, value in saved.state[source].items():
                if not isinstance(value, Tensor):
                    state[name] = copy.deepcopy(value)
                elif name in state:
                    state[name].copy_(value)


def _suspects(one: Optimizer, other: Optimizer) -> str:
    """Return the attributes that differ, for a message."""
    names = sorted(
        each for each in vars(one).keys() - {"state", "param_groups"} if _text(one, each) != _text(other, each)
    )
    return f" (self.{', self.'.join(names)})" if names else ""


def _text(optimizer: Optimizer, name: str) -> str:
    value = vars(optimizer).get(name)
    return repr(value) if isinstance(value, bool | int | float | Tensor | list | tuple | dict | None) else ""
