"""State of a script's optimizer and scheduler besides tensors, as text for a checkpoint's manifest."""

import base64
import hashlib
import io
import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.errors import CheckpointError, ConfigError, ModelError, few
from lockstep.checkpoint import reader
from lockstep.training.optimizer_memory import give_zero_gradients, refuse_unsaved_memory

OPTIMIZER = "optimizer."
"""Prefix of the names of its tensors: see TrainState.tensors."""

GROUPS = "optim.groups."
"""Prefix of its parameter groups in the numeric recipe."""


def made_scheduler(scheduler: Any, schedule: object, *, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return a script's scheduler, or what its function makes. Raises ConfigError where it gives a `schedule`, too."""
    if scheduler is not None and schedule is not None:
        raise ConfigError("lockstep.Loop: give scheduler or schedule, not both")
    made = scheduler(optimizer, steps) if isinstance(scheduler, FunctionType | partial) else scheduler
    if scheduler is not None and (isinstance(made, type) or not hasattr(made, "state_dict")):
        what = f"lockstep.Loop: scheduler={made!r}: it is a scheduler of torch, such as ExponentialLR(optimizer, 0.9)"
        raise ConfigError(f"{what}, or a function of optimizer and steps that returns one")
    return made


class ScriptOptimizer:
    """A script's optimizer, with its scheduler, if any. Raises ConfigError, ModelError where they cannot be used."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.variables: dict[str, Any] = {}
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._check_kind()
        self.check_parameters()
        self.initial = deepcopy(self._options())  # a scheduler changes rates that are tensors in place
        """Options of the parameter groups as the script has made them."""
        try:
            self.scheduled: dict[str, Any] = {} if scheduler is None else _unpacked(_packed(scheduler.state_dict()))
            """State of the scheduler as the script has made it."""
            _unpacked(self.state())
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"what the optimizer or the scheduler remembers cannot be kept in a checkpoint ({first_line}): "
                "give a function of the step's number instead, schedule=..., or an optimizer with plain numbers"
            ) from None
        refuse_unsaved_memory(optimizer, lambda copy: copy.step(), saves_groups=True)

    def state(self) -> str:
        """Return the state for a checkpoint. Raises ModelError where a variable cannot be kept."""
        for name, value in self.variables.items():
            try:
                _unpacked(_packed(value))
            except Exception as error:
                raise ModelError(
                    f"loop.variables[{name!r}] ({type(value).__name__}) cannot be kept in a checkpoint: use numbers, "
                    "texts, tensors, and lists and dicts of them"
                ) from error
        return _packed(self._memory())

    def load(self, text: str) -> None:
        """Take what `state` returned; tensors are loaded with those of the model."""
        memory = _unpacked(text)
        self.variables.update(memory.get("variables", {}))
        began = memory.get("initial", self.initial)
        for group, options, old, new in zip(
            self.optimizer.param_groups, memory["groups"], began, self.initial, strict=True
        ):
            changed = {name for name in new if name in old and repr(old[name]) != repr(new[name])}  # allow_drift
            group.update({name: value for name, value in options.items() if name not in changed})
        parameters = {name: parameter for parameter, name in self.names.items()}
        for name, values in memory["values"].items():
            self.optimizer.state[parameters[name]].update(values)
        if self.scheduler is not None and memory["scheduler"] is not None:
            began, made = memory.get("scheduled", self.scheduled), self.scheduled
            other = {name for name in {*began, *made} if repr(began.get(name)) != repr(made.get(name))}  # allow_drift
            kept = {name: value for name, value in memory["scheduler"].items() if name not in other}
            self.scheduler.load_state_dict(self.scheduler.state_dict() | kept)

    def prepare(self, folder: Path, text: str) -> None:
        """Train the parameters that a checkpoint in a folder has trained, whose `state` was this text. Run one step if
        it has the optimizer's tensors, which makes those to load; the weights that the step changes are loaded, too."""
        memory = _unpacked(text)
        if (before := len(memory["groups"])) != (now := len(self.optimizer.param_groups)):
            raise CheckpointError(f"the optimizer had {before} groups of parameters, and has {now}: make it as it was")
        for parameter, name in self.names.items() if "trained" in memory else ():
            parameter.requires_grad_(name in memory["trained"])
        if not any(name.startswith(OPTIMIZER) for name in reader.contents(folder)):
            return
        give_zero_gradients(self.optimizer)
        if "stepped" in memory:
            for parameter, name in self.names.items():
                parameter.grad = torch.zeros_like(parameter) if name in memory["stepped"] else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def numeric(self) -> dict[str, Any]:
        """Return its settings that change the weights, for the numeric recipe."""
        settings: dict[str, Any] = {"optim.kind": type(self.optimizer).__name__.lower()}
        for name, value in sorted(self.optimizer.defaults.items()):
            try:
                settings[f"optim.{name}"] = json.loads(json.dumps(value))
            except TypeError:
                continue
        for number, (group, options) in enumerate(zip(self.optimizer.param_groups, self.initial, strict=True)):
            plain = {key: repr(value) for key, value in self.optimizer.defaults.items()}
            own = {key: repr(value) for key, value in options.items() if repr(value) != plain.get(key)}
            if len(self.initial) > 1:
                own["parameters"] = _short_hash("\n".join(self.names[parameter] for parameter in group["params"]))
            settings[f"{GROUPS}{number}"] = own
        settings["optim.scheduler"] = None
        if self.scheduler is not None:
            plain = {name: repr(value) for name, value in self.scheduled.items() if not name.startswith("_")}
            others = repr({name: value for name, value in self.scheduled.items() if name.startswith("_")})
            settings["optim.scheduler"] = {
                "kind": type(self.scheduler).__name__,
                **plain,
                "others": _short_hash(others),
            }
        return settings

    def _options(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]

    def _memory(self) -> dict[str, Any]:
        values = {
            self.names[parameter]: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for parameter, state in self.optimizer.state.items()
        }
        return {
            "groups": self._options(),
            "initial": self.initial,
            "values": {name: kept for name, kept in values.items() if kept},
            "trained": [name for parameter, name in self.names.items() if parameter.requires_grad],
            "stepped": [*values],
            "variables": self.variables,
            "scheduled": self.scheduled,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def _check_kind(self) -> None:
        optimizer, scheduler = self.optimizer, self.scheduler
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"lockstep.Loop takes a torch optimizer, not a {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ModelError("LBFGS runs the model several times in a step: lockstep.Loop takes optimizers that do not")
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ConfigError("the scheduler belongs to another optimizer")
        if scheduler is None and getattr(optimizer.step, "_wrapped_by_lr_sched", False):
            raise ConfigError(
                "a scheduler was made for this optimizer: give it to lockstep.Loop, scheduler=..., so that a resumed "
                "run goes on with its learning rate"
            )

    def check_parameters(self) -> None:
        """Raise ModelError for parameters that the optimizer lacks, or cannot train."""
        own = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if own - self.names.keys():
            raise ModelError("the optimizer has parameters that are not the model's: put all into one nn.Module")
        left = [name for parameter, name in self.names.items() if parameter.requires_grad and parameter not in own]
        if left:
            raise ModelError(
                f"the optimizer does not have the parameters {few(left)}: give it all, or freeze them with "
                "requires_grad_(False)"
            )
        other = [
            name for parameter, name in self.names.items() if parameter.dtype != torch.float32 and parameter in own
        ]
        if other:
            raise ModelError(f"weights that are trained are float32, {few(other)} are not: use model.float()")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _packed(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def _unpacked(text: str) -> Any:
    """Load what `_packed` wrote; executes nothing that the text might hold."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True, map_location="cpu")
