"""A user's file: a buffer that grows with every forward pass, in the checkpoint or not, and one that changes but is in
no checkpoint."""

import math

import torch
from torch import nn


class Growing(nn.Module):
    def __init__(self, pixels, classes, saved):
        super().__init__()
        self.head = nn.Linear(pixels, classes)
        self.register_buffer("history", torch.zeros(0), persistent=saved)
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, batch):
        x = batch["image"].flatten(1) / 255
        if self.training:
            self.history = torch.cat([self.history, x.mean().detach()[None]])
            self.hidden += x.detach().mean()
        return self.head(x)


def build(options, spec):
    return Growing(math.prod(spec.image_shape), len(spec.labels), options["saved"])
