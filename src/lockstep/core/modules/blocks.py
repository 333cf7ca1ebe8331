"""The blocks of a module, which run one after the other, found by its structure."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """List the members of every ModuleList and the modules beside them; without ModuleLists the module's children, or
    itself. What computes a weight from parameters, such as weight_norm, belongs to the module that has the weight."""
    if _has_list(module):
        return list(dict.fromkeys(_walk(module)))
    return list(dict.fromkeys(module.children())) or [module]


def with_weights(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """List the blocks that have parameters; the others, such as activations, can run anywhere."""
    return [block for block in blocks if next(block.parameters(), None) is not None]


def _has_list(module: nn.Module) -> bool:
    return any(map(_is_list, module.modules()))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and not isinstance(module, ParametrizationList)


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    if _is_list(module):
        for member in module.children():
            yield from _walk(member) if _is_list(member) else [member]
    elif _has_list(module):
        for child in module.children():
            yield from _walk(child)
    else:
        yield module
