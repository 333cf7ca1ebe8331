"""A loss some of whose sums are reported only by the micro-batches that have something to report ("all_..." by all), and
losses that are constants for some micro-batches."""

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import LossSum


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, batch):
        return self.net(batch["image"].float() / 16)


KIND = [""]


def build(options, spec):
    KIND[0] = options.get("loss", "")
    return Uneven()


def loss(outputs, batch):
    labels = batch["label"]
    ones = labels == 1
    if KIND[0] == "detached":
        return LossSum(F.cross_entropy(outputs.detach(), labels, reduction="sum"), len(labels))
    if KIND[0] == "masked":
        return LossSum(F.cross_entropy(outputs, labels.masked_fill(~ones, -100), reduction="sum"), ones.sum())
    if KIND[0] == "of ones" and not ones.any():
        return LossSum(torch.zeros(()), 0)
    if KIND[0] == "of ones":
        return LossSum(F.cross_entropy(outputs[ones], labels[ones], reduction="sum"), int(ones.sum()))
    is_odd = int(labels.sum()) % 2 == 1
    every = {
        "zeros": (labels == 0).sum(),
        "nines_right": ((labels == 9) & (outputs.argmax(1) == 9)).sum(),
        "odd": torch.tensor(1000.0 * is_odd),
        "even": torch.tensor(1.0 - is_odd),
        "rare": torch.tensor(float(int(labels.sum()) % 13 == 0)),
    }
    some = {name: value for name, value in every.items() if value > 0}
    total = F.cross_entropy(outputs, labels, reduction="sum")
    return LossSum(total, len(labels), {**{f"all_{name}": value for name, value in every.items()}, **some})
