"""Which optimizer, learning rate and weight decay each parameter has."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.base.errors import ConfigError
from lockstep.base.name_patterns import matching
from lockstep.training.optim_config import GroupSection, OptimSection

MATRICES = "muon"
"""The kind that takes matrices only; embeddings and everything else go to `OTHERS`, as its authors say (K. Jordan et
al., Muon: An Optimizer for Hidden Layers in Neural Networks, 2024)."""
OTHERS = "adamw"
LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.)")
"""The name of a numbered module at the start of a parameter's."""


@dataclass(frozen=True)
class ParameterRule:
    """How a parameter is updated."""

    kind: str
    section: OptimSection | GroupSection
    """Where its `options` are."""
    lr_scale: float
    """Learning rate as a multiple of the run's."""
    weight_decay: float

    @property
    def owner(self) -> tuple[str, int]:
        """Parameters with the same one share an optimizer."""
        return self.kind, id(self.section)


Rules = Mapping[str, ParameterRule]
"""By the parameter's name; of tied parameters by each of their names."""


def rules_of(config: OptimSection, model: nn.Module) -> Rules:
    """The rules of a model's trained parameters, before a strategy splits them. Raises ConfigError for patterns that
    match nothing, and where there is nothing to train."""
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
    """Of each parameter, decay to the power of the number of layers above it. Raises ConfigError without layers."""
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
