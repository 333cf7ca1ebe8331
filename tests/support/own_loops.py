"""Training loops of scripts, with lockstep.Loop and without."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import lockstep

SIZES = {"global_batch": 24, "micro_batch": 8, "epochs": 2}


class Points(torch.utils.data.Dataset):
    """100 samples: the last step of an epoch has four of them, in one micro-batch. Some noise is added when one is read."""

    def __init__(self, seed=0, count=100):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return {"x": x + 0.01 * torch.randn(6), "y": int(x.sum() > 0)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)])
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return self.heads[int(x.sum() > 0)](x)  # one of them is unused in a micro-batch


def made(folder, *, threads=1, optimizer=torch.optim.SGD, scheduler=None, dataset=None, **settings):
    """A loop on a new model: model, scheduler, loop."""
    lockstep.seed(3)
    model = Net()
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    own = optimizer(model.parameters(), lr=0.05, **options)
    scheduler = scheduler and scheduler(own)
    data = Points() if dataset is None else dataset
    return model, scheduler, lockstep.Loop(model, own, data, folder=folder, scheduler=scheduler, **SIZES | settings)


def losses(model, batch, reduction="sum"):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction)


def trained(folder, until=None, **settings):
    """Train, perhaps until a step only: digest, steps that were run, their mean losses, figures of an evaluation."""
    model, scheduler, loop = made(folder, **settings)
    seen = []
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
        if scheduler:
            scheduler.step()
        seen.append((step.number, step.loss, step.learning_rate))
        if loop.done == until:
            break

    def measure(batch):
        logits = model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"], reduction="none")
        return {"loss": loss, "right": logits.argmax(1) == batch["y"], "samples": len(loss)}

    return loop.digest, seen, loop.evaluate(Points(1, 45), measure)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


def halved(step):
    return 0.5**step
