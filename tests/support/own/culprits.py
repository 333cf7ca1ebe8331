"""A user's file whose model breaks the promise in one of many ways, as options.odd says, or in none."""

import itertools
import math
import os
import random
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import LossSum

CALLS = 0
GENERATOR = np.random.default_rng(3)
WIDTH = 16


class Sound(nn.Module):
    """Dropout as a function; keeps what it saw, and a table that it makes once."""

    def __init__(self):
        super().__init__()
        self.last, self.table = None, None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(WIDTH)
        self.last = F.dropout(x, 0.2, self.training) * self.table
        return self.last


class Ranked(nn.Module):
    def forward(self, x):
        return x + 1e-3 * torch.distributed.get_rank()


class Unseeded(nn.Module):
    def forward(self, x):
        return x + 0.01 * torch.from_numpy(np.random.default_rng().normal(size=tuple(x.shape))).to(x)


class Clock(nn.Module):
    def forward(self, x):
        return x + 1e-3 * (time.time() % 1)


class Urandom(nn.Module):
    def forward(self, x):
        return x + 1e-5 * int.from_bytes(os.urandom(2), "little")


class Dice(nn.Module):
    def __init__(self):
        super().__init__()
        self.dice = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.dice) > 0.2)


class PythonDice(nn.Module):
    def __init__(self):
        super().__init__()
        self.dice = random.Random(3)

    def forward(self, x):
        return x + 0.01 * self.dice.random()


class FileDice(nn.Module):
    def forward(self, x):
        return x + 1e-3 * GENERATOR.normal()


class Counting(nn.Module):
    """Changes nothing before its seventh call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1.1 if self.calls % 7 == 0 else 1)


class FileCounting(nn.Module):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return x + 1e-3 * (CALLS % 5)


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = deque(maxlen=5)

    def forward(self, x):
        self.seen.append(x.detach().mean(0))
        return x - 0.1 * torch.stack(list(self.seen)).mean(0)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


@dataclass
class Memory:
    total: float = 0.0


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def forward(self, x):
        self.memory.total = 0.9 * self.memory.total + 0.1 * float(x.detach().mean())
        return x + self.memory.total


class Ticket(nn.Module):
    """Its state is in an iterator, into which nobody can look."""

    def __init__(self):
        super().__init__()
        numbers = itertools.cycle([0.0, 1.0, 2.0])
        self.number = lambda: next(numbers)

    def forward(self, x):
        return x + 1e-3 * self.number()


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(3 * torch.ones(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return x * self.weight


class Hidden(Unseeded):
    """Its noise is multiplied by zero at first."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.noise = Unseeded()

    def forward(self, x):
        return x + self.gate * self.noise(x)


KINDS = [Sound, Ranked, Unseeded, Clock, Urandom, Dice, PythonDice, FileDice, Counting, FileCounting, Queue, Mean]
KINDS += [Remembering, Ticket, Renormed, Hidden]


class Network(nn.Module):
    def __init__(self, pixels, classes, odd):
        super().__init__()
        first = [nn.Flatten(), nn.Linear(pixels, WIDTH), nn.BatchNorm1d(WIDTH), odd, nn.ReLU(), nn.Dropout(0.2)]
        self.body = nn.Sequential(*first)
        self.neck, self.waist = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, batch):
        return self.head(torch.relu(self.waist(torch.relu(self.neck(self.body(batch["image"] / 255))))))


class Lossy(Network):
    """With a loss of another kind."""

    def __init__(self, kind, *given):
        super().__init__(*given)
        self.kind = kind

    def loss(self, outputs, batch):
        label = batch["label"]
        if self.kind == "mean of one":
            return LossSum(F.cross_entropy(outputs, label), 1)
        if self.kind == "mean":
            return LossSum(F.cross_entropy(outputs, label), len(label))
        if self.kind == "contrastive":
            near = F.normalize(outputs, dim=1)
            return LossSum(F.cross_entropy(near @ near.T, torch.arange(len(near)), reduction="sum"), len(near))
        if self.kind == "unseeded":
            noise = 1 + 0.01 * np.random.default_rng().random()
            return LossSum(noise * F.cross_entropy(outputs, label, reduction="sum"), len(label))
        assert self.kind == "ignoring"
        ignored = torch.where(label == 3, -100, label)
        return LossSum(F.cross_entropy(outputs, ignored, reduction="sum"), (ignored != -100).sum())


def build(options, spec):
    odd = next(kind for kind in KINDS if kind.__name__ == options.get("odd", "Sound"))()
    given = math.prod(spec.image_shape), len(spec.labels), odd
    return Lossy(options["loss"], *given) if "loss" in options else Network(*given)


def augment(sample):
    return sample
