"""lockstep.Loop with parameters that the script freezes and unfreezes between steps: the values of a plain loop."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from own_loops import Points
from torch import nn

import lockstep
from lockstep.base.errors import LockstepError

SIZES = {"global_batch": 24, "micro_batch": 8, "epochs": 3}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 2)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x).tanh())


class Plain(Points):
    def __getitem__(self, index):
        return {"x": self.x[index], "y": int(self.x[index].sum() > 0)}


def change(model, number):
    """The body is trained in steps 4 to 8, the head's bias from then on no more."""
    if number in (4, 9):
        model.body.requires_grad_(number == 4)
    if number == 9:
        model.head.bias.requires_grad_(False)


def looped(folder, kind, until=None):
    lockstep.seed(3)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters(), 0.05)
    loop = lockstep.Loop(model, optimizer, Plain(), folder=folder, save_steps=1, **SIZES)
    seen = []
    for step in loop:
        change(model, step.number)
        for batch in step:
            seen.append((step.number, batch["x"]))
            step.backward(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"))
        if loop.done == until:
            break
    return loop.digest, {name: each.clone() for name, each in model.state_dict().items()}, seen


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_values_of_a_plain_loop(ranks, tmp_path, kind):
    """On any number of processes, and after a resume from each part of the training, whose script changes nothing again."""
    ((digest, found, seen),) = ranks(1, looped, tmp_path / "1", kind)
    lockstep.seed(3)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters(), 0.05)
    for number in range(15):
        change(model, number)
        x = torch.cat([batch for step, batch in seen if step == number])
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        optimizer.step()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    for world, until in ((2, 3), (2, 6), (3, 11)):
        folder = tmp_path / f"{world} {until}"
        ranks(world, looped, folder, kind, until)
        assert {each[0] for each in ranks(3 - world % 2, looped, folder, kind)} == {digest}


def apart(folder):
    lockstep.seed(3)
    model = Net()
    loop = lockstep.Loop(model, torch.optim.SGD(model.parameters(), 0.05), Plain(), folder=folder, **SIZES)
    try:
        for step in loop:
            model.body.weight.requires_grad_(step.number == 1)
            model.body.bias.requires_grad_(step.number == 1 and dist.get_rank() == 1)
            for batch in step:
                step.backward(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"))
    except LockstepError as error:
        return str(error)


def lacking(folder):
    lockstep.seed(3)
    model = Net()
    loop = lockstep.Loop(model, torch.optim.SGD(model.head.parameters(), 0.05), Plain(), folder=folder, **SIZES)
    try:
        for step in loop:
            change(model, step.number)
            for batch in step:
                step.backward(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"))
    except LockstepError as error:
        return str(error)


def test_what_cannot_be_trained_is_told(ranks, tmp_path):
    for said in ranks(2, apart, tmp_path / "apart"):
        assert "differs between the processes" in said
    assert "the optimizer does not have the parameters" in ranks(1, lacking, tmp_path / "lacking")[0]
