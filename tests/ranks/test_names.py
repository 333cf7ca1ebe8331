"""Names that people use for their own things: whatever a module calls its parts, none is taken for Lockstep's."""

import pytest
from torch import nn
from training_runs import config_in, run_on_rank

from lockstep.base.errors import ModelError
from lockstep.core.modules.blocks import blocks_of
from lockstep.models._own_functions import chosen_loss
from lockstep.models._user import own_blocks

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import LossSum
"""

MODELS = {
    "lists and losses as attributes": """
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 16), nn.Linear(16, 16)])
        self.loss = nn.CrossEntropyLoss()
        self.initial = nn.Parameter(torch.zeros(16))
        self.metrics, self.strategy, self.lengths, self.spec, self.total = {}, "none", [1], None, 3
        self.head = nn.Linear(16, 10)
    def forward(self, batch):
        x = batch["image"].flatten(1) / 255
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x + self.initial)
""",
    "a sequence, a method of another meaning": """
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16))
        self.network, self.tensor_plan = nn.Linear(16, 10), 7
    def loss(self, weight):
        return weight
    def forward(self, batch):
        return self.network(self.blocks(batch["image"].flatten(1) / 255))
""",
    "methods named blocks with arguments, nested lists, one layer used twice": """
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(16, 16)
        self.stages = nn.ModuleList([nn.ModuleList([nn.Linear(64, 16), shared]), nn.ModuleList([shared])])
        self.head = nn.Linear(16, 10)
    def blocks(self, x):
        for stage in self.stages:
            for layer in stage:
                x = torch.tanh(layer(x))
        return x
    def forward(self, batch):
        return self.head(self.blocks(batch["image"].flatten(1) / 255))
""",
    "a Model of Lockstep's own": """
from lockstep import Model

class Network(Model):
    def __init__(self):
        super().__init__()
        self.initial = nn.Parameter(torch.zeros(10))
        self.head = nn.Linear(64, 10)
    def forward(self, batch):
        return self.head(batch["image"].flatten(1) / 255) + self.initial
    def loss(self, outputs, batch):
        return LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), len(outputs))
    def blocks(self):
        return [self.head]
""",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_users_names_are_the_users(ranks, tmp_path, name):
    file = tmp_path / "named.py"
    file.write_text(f"{HEAD}\n{MODELS[name]}\n\ndef build(options, spec):\n    return Network()\n")
    model = {"kind": "user", "file": str(file)}
    found = [
        ranks(world, run_on_rank, config_in(tmp_path, f"{world}{kind}", model=model, parallel={"kind": kind}))[0]
        for world, kind in ((1, "single"), (2, "ddp"))
    ]
    assert all(isinstance(summary, dict) for summary in found), found
    assert [summary["status"] for summary in found] == ["finished"] * 2
    assert len({summary["digest"] for summary in found}) == 1


class With(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_blocks_are_found_under_any_kind_of_name():
    one, two, head = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    for parts in (nn.ModuleList([one, two]), nn.Sequential(one, two), nn.ModuleList([nn.ModuleList([one]), two])):
        assert own_blocks(With(blocks=parts, head=head)) == [one, two, head]
    assert own_blocks(With(blocks=3, head=head)) == [head]
    assert own_blocks(With(blocks=lambda: [two, one, two], a=one, b=two)) == [two, one]
    assert own_blocks(With(blocks=lambda: 3, head=head)) == [head]
    assert blocks_of(nn.ModuleList([nn.ModuleList([one]), two])) == [one, two]
    three = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))  # a ModuleList computes its weight
    assert blocks_of(nn.ModuleDict({"head": three, "body": nn.ModuleList([one])})) == [three, one]


def test_a_loss_is_a_function_of_outputs_and_batch():
    def own(outputs, batch):
        return None

    assert chosen_loss(With(loss=own).loss, None) is own
    assert chosen_loss(With(loss=nn.CrossEntropyLoss()).loss, own) is own
    assert chosen_loss(With(loss=lambda x: x).loss, own) is own
    assert chosen_loss(With(loss=3.0).loss, nn.CrossEntropyLoss()) is None
    for loss in (nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        with pytest.raises(ModelError, match="is a mean over the micro-batch"):
            chosen_loss(With(loss=loss).loss, None)
