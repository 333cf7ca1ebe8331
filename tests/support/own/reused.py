"""A model whose parts run several times in a forward pass, and a loss that reports how far their draws agree."""

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import LossSum


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 32))
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5))
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(32, 10)

    def forward(self, batch):
        x = self.first(batch["image"].float() / 16)
        views = [self.encoder(x), self.encoder(x)]
        masks = [self.drop(torch.ones_like(x)) for _ in range(3)]
        noise, layers = [], []
        for _ in range(4):
            layers.append(self.layer(x))
            noise.append(torch.rand(len(x)))
            x = x + layers[-1]
        pairs = {"view": views, "mask": masks[1:], "noise": noise[2:], "layer": [each == 0 for each in layers[:2]]}
        agree = {name: (one == other).float().view(len(x), -1).mean(1) for name, (one, other) in pairs.items()}
        return {"logits": self.head(self.drop(sum(views) + x) * masks[0]), **agree}


def build(options, spec):
    return Reused()


def loss(outputs, batch):
    total = F.cross_entropy(outputs["logits"], batch["label"], reduction="sum")
    return LossSum(total, len(batch["label"]), {name: outputs[name].sum() for name in outputs if name != "logits"})
