"""A user's file: a copy of some weights that follows them, declared or by the forward pass itself; weights that begin or
cease to be trained."""

import copy
import math

import torch
from torch import nn


class Following(nn.Module):
    def __init__(self, pixels, classes, odd):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(pixels, 13), nn.Tanh())
        self.target = copy.deepcopy(self.online)
        self.head = nn.Linear(13, classes)
        self.target.requires_grad_(odd == "declared")  # where it is declared, Lockstep freezes it
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.online.requires_grad_(odd not in ("late", "config"))
        self.odd = odd

    def forward(self, batch):
        x = batch["image"].flatten(1) / 255
        if self.training:
            self.calls += 1
            self.change()
        with torch.no_grad():
            target = self.target(x)
        return self.head(self.online(x) + 0.5 * target)

    def change(self):  # noqa: C901
        pairs = list(zip(self.target.parameters(), self.online.parameters(), strict=True))
        with torch.no_grad():
            if self.odd == "momentum":
                for mine, theirs in pairs:
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
            if self.odd == "data":
                for mine, theirs in pairs:
                    mine.data = mine.data * 0.9 + theirs.data * 0.1 + 0.01
            if self.odd == "clamped":
                self.online[0].weight.data.clamp_(-0.05, 0.05)
            if self.odd == "copied" and self.calls > 6:
                self.target.load_state_dict(self.online.state_dict())
            if self.odd == "by-hand" and self.calls > 6:
                self.head.bias.zero_()
        if self.odd in ("late", "early") and self.calls > 6:
            self.online.requires_grad_(self.odd == "late")


def build(options, spec):
    return Following(math.prod(spec.image_shape), len(spec.labels), options["odd"])


def averages(module):
    return {"target": ("online", 0.9)} if module.odd == "declared" else {}
