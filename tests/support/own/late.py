"""A user's file: a layer that begins to change its weight, or a buffer, without autograd's knowledge; or weights that no
loss reaches."""

import math

import torch
from torch import nn


class Late(nn.Linear):
    def __init__(self, inputs, outputs, odd):
        super().__init__(inputs, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(13))
        self.odd = odd

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.odd == "weight" and self.calls > 20:
                self.weight.data.mul_(0.99)
            if self.odd == "bias" and self.calls > 20:
                self.bias.data = self.bias.data * 0.99
            if self.odd == "level" and self.calls > 20:
                self.level.data += 1
        return super().forward(x)


class Layers(nn.Module):
    def __init__(self, pixels, classes, odd):
        super().__init__()
        self.first, self.second = nn.Linear(pixels, 17), nn.Linear(17, 13)
        self.head = Late(13, classes, odd)
        if odd == "spare":
            self.first.spare = nn.Linear(2, 3)

    def forward(self, batch):
        return self.head(self.second(self.first(batch["image"].flatten(1) / 255).tanh()).tanh())


def build(options, spec):
    return Layers(math.prod(spec.image_shape), len(spec.labels), options["odd"])
