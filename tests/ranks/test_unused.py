"""Parts of a model that a step, or some of its micro-batches, do not use: the same bits on every world and strategy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategy_runs import trained
from torch import nn

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import LockstepError
from lockstep.base.model_contracts import LossSum, Model
from lockstep.core.reduction.gradient_norm import average_
from lockstep.data.order import Order


class Heads(Model):
    """A body and three heads; a head is left out where no sample of a micro-batch asks for it."""

    def __init__(self, skips):
        super().__init__()
        self.skips = skips
        self.body = nn.Sequential(nn.Linear(8, 12), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(12, 4) for _ in range(3)])
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, batch):
        x = self.body(batch["x"])
        out = torch.zeros(len(x), 4)
        for number, head in enumerate(self.heads):
            rows = batch["head"] == number
            if not self.skips or rows.any():
                out = out.index_put((rows,), head(x[rows]))
        return out

    def loss(self, outputs, batch):
        return LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), len(outputs))

    def blocks(self):
        return [self.body, *self.heads]


class Samples:
    """Each sample asks for one head, by a pattern that is repeated."""

    spec, lengths = DataSpec(modality="any", labels=tuple("abcd")), None

    def __init__(self, pattern, count):
        generator = np.random.default_rng(0)
        self.x = generator.standard_normal((count, 8)).astype(np.float32)
        self.label = generator.integers(0, 4, count)
        self.head = np.array([pattern[i % len(pattern)] for i in range(count)])

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        indices = list(indices)
        return {"x": self.x[indices], "label": self.label[indices], "head": self.head[indices]}


FIND = {"find_unused": True}
LAYOUTS = [("ddp", 2, FIND), ("ddp", 3, FIND), ("ddp", 5, FIND), ("fsdp", 1, {}), ("fsdp", 3, {})]


class Task:
    """A model and data for `trained`: heads that are left out, or run without samples, by a pattern."""

    def __init__(self, pattern, *, skips):
        self.skips, self.pattern = skips, pattern

    def __iter__(self):
        return iter((lambda: Heads(self.skips), lambda count: Samples(self.pattern, count)))


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.booleans())
def test_any_pattern_of_use_gives_the_same_bits(ranks, pattern, skips):
    task = Task(pattern, skips=skips)
    (expected,) = ranks(1, trained, task, "single", {}, {})
    for kind, world, config in LAYOUTS:
        if kind == "fsdp" and skips:
            continue
        for found in ranks(world, trained, task, kind, config, {}):
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert one == other, (kind, world, number)


def refused_on_rank(task):
    try:
        trained(task, "fsdp", {}, {})
    except LockstepError as error:
        return str(error)
    return "no error"


def test_fsdp_refuses_blocks_that_some_micro_batches_leave_out(ranks):
    order = Order(seed=3, samples=43, global_batch=16, micro_batch=3)
    pattern = [0] * 43
    for head, sample in enumerate(order.shards(0)[0]):
        pattern[sample] = head  # all heads in the first micro-batch, one in the others
    (message,) = ranks(1, refused_on_rank, Task(pattern, skips=True))
    assert message.startswith("heads.1 does not run once in every micro-batch")
    assert "parallel.kind=ddp with parallel.find_unused=true" in message


@pytest.mark.parametrize("count", [1, 3])
def test_a_minus_zero_is_a_zero(count):
    gradients = [torch.tensor([-0.0, 0.0, 3.0]), torch.tensor(-0.0)]
    average_(gradients, torch.tensor(3.0), count=torch.tensor(count, dtype=torch.float64), max_norm=None)
    assert not any(torch.signbit(gradient).any() for gradient in gradients)
