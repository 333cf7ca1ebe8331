"""The network of model.kind=cnn."""

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model
from lockstep.models.cnn import Config
from lockstep.models.objectives._choice import ObjectiveModel, width_of


def channels_last(images: Tensor) -> Tensor:
    """Give images [m, C, H, W] the strides of channels_last, also where C = 1. There
    `contiguous(memory_format=torch.channels_last)` changes nothing, and convolutions choose the other format."""
    count, channels, height, width = images.shape
    return images.permute(0, 2, 3, 1).flatten(1).view(count, height, width, channels).permute(0, 3, 1, 2)


class Features(nn.Module):
    """Images uint8 [m, C, H, W] -> features [m, ((H-4)//2) * ((W-4)//2) * 64]."""

    def __init__(self, channels: int, config: Config) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout(0.25)
        self.scale, self.shift = 1 / (255 * config.std), config.mean / config.std

    def forward(self, images: Tensor) -> Tensor:
        """Normalise the pixels, then convolve in channels_last, the fastest memory format for convolutions."""
        x = channels_last(images.to(self.conv1.weight.dtype) * self.scale - self.shift)
        x = self.conv2(F.relu(self.conv1(x)))
        x = F.relu(F.max_pool2d(x, 2))  # the same numbers as pooling after it, on a quarter of the elements
        return self.dropout(x).permute(0, 2, 3, 1).flatten(1)  # in memory order: without a copy


class Head(nn.Module):
    """Features [m, F] -> outputs [m, K], such as logits of classes."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(features, 128), nn.Linear(128, outputs)
        self.dropout = nn.Dropout(0.5)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(self.dropout(F.relu(self.fc1(features))))


class CNN(ObjectiveModel):
    """Network for images of one size."""

    def __init__(self, spec: DataSpec, config: Config) -> None:
        super().__init__(spec)
        if spec.image_shape is None or min(spec.image_shape[1:]) < 6:
            raise ModelError(f"model.kind=cnn needs images of at least 6x6, but the data gives {spec.image_shape}")
        channels, height, width = spec.image_shape
        self.grid = (height - 4) // 2, (width - 4) // 2
        self.features = Features(channels, config)
        self.head = Head(64 * math.prod(self.grid), width_of(spec))

    def forward(self, batch: Batch) -> Tensor:
        """batch["image"] uint8 [m, C, H, W] -> outputs [m, K], such as logits of classes."""
        return self.head(self.features(batch["image"]))

    def renamed(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Convert weights of PyTorch's MNIST example (conv1, conv2, fc1, fc2), whose fc1 reads channel by channel."""
        found = {name.removeprefix("module."): value for name, value in weights.items()}
        if not {"conv1.weight", "fc1.weight"} <= found.keys():
            return weights
        if found["fc1.weight"].shape[1:] == (64 * math.prod(self.grid),):
            by_channel = found["fc1.weight"].unflatten(1, (64, *self.grid))
            found["fc1.weight"] = by_channel.permute(0, 2, 3, 1).flatten(1)
        return {f"{'features' if name.startswith('conv') else 'head'}.{name}": found[name] for name in found}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load weights as PyTorch does, and also those of its MNIST example."""
        return super().load_state_dict(self.renamed(state_dict), *args, **options)

    def blocks(self) -> list[nn.Module]:
        return [self.features, self.head]


def build(config: Config, spec: DataSpec) -> Model:
    """Build the network for the data's image size and classes."""
    return CNN(spec, config)
