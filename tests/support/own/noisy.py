"""A user's file that draws random numbers wherever it can: in the samples, in layers, and by leaving layers out."""

import random

import numpy as np
import torch
from torch import nn


class Layer(nn.Module):
    """A residual layer that is sometimes left out (stochastic depth), with noise from each generator there is."""

    def __init__(self, width, depth):
        super().__init__()
        self.inner, self.depth = nn.Linear(width, width), depth

    def forward(self, x):
        if not self.training:
            return x + torch.relu(self.inner(x))
        kept = (torch.rand(len(x), 1) > 0.1 * self.depth).to(x.dtype)
        noise = random.gauss(0, 0.01) + np.random.normal(0, 0.01) + 0.01 * torch.randn_like(x)
        return x + kept * torch.relu(self.inner(x)) + noise


class Noisy(nn.Module):
    """Every layer is a block; before them and between them there is randomness of no block."""

    def __init__(self, pixels, classes):
        super().__init__()
        self.enter = nn.Linear(pixels, 24)
        self.layers = nn.ModuleList([Layer(24, depth) for depth in (1, 3)])
        self.head = nn.Linear(24, classes)

    def forward(self, batch):
        x = batch["image"].flatten(1) / 255
        if self.training:
            x = x * (1 + 0.05 * random.random()) + 0.01 * torch.randn_like(x)
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
            if self.training:
                x = x + 0.01 * np.random.random()
        return self.head(x)


def build(options, spec):
    return Noisy(int(np.prod(spec.image_shape)), len(spec.labels))


def augment(sample):
    """Shift, darken and blot an image [C, H, W]: a draw from Python, NumPy and torch each."""
    image = np.roll(sample["image"], random.randint(-1, 1), axis=2)
    image = (image * np.random.uniform(0.8, 1.0)).astype(np.uint8)
    return {**sample, "image": np.where(torch.rand(image.shape).numpy() < 0.05, 0, image).astype(np.uint8)}
