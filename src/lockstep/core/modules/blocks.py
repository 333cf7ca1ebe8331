"""The parts of a module that run one after the other, found by its structure."""

from collections.abc import Iterator, Sequence

from torch import nn


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The layers of every list of layers, and whatever lies beside the way to them; a module without lists of layers
    gives its children, or itself."""
    if any(isinstance(part, nn.ModuleList) for part in module.modules()):
        return list(dict.fromkeys(_walk(module)))
    return list(dict.fromkeys(module.children())) or [module]


def with_weights(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that hold parameters: the others, such as activations, go wherever they are needed."""
    return [block for block in blocks if next(block.parameters(), None) is not None]


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList):
        for part in module:
            yield from _walk(part) if isinstance(part, nn.ModuleList) else [part]
    elif any(isinstance(part, nn.ModuleList) for part in module.modules()):
        for child in module.children():
            yield from _walk(child)
    else:
        yield module
