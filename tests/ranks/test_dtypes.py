"""Parameters of other dtypes than fp32, also several in one block: the same bits by each strategy, the values of a plain loop."""

import pytest
import torch
import torch.nn.functional as F
from members import further
from strategy_runs import Network, images, prepared, trained
from torch import nn

from lockstep.training.step import step


class Cast(nn.Module):
    """A layer that computes in its own dtype and gives that of its input."""

    def __init__(self, inner, dtype):
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, x):
        return self.inner(x.to(self.dtype)).to(x.dtype)


class Doubled(Network):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.to(dtype)

    def forward(self, batch):
        return super().forward({**batch, "image": batch["image"].to(self.gain.dtype)})


class Halves(Doubled):
    def __init__(self):
        super().__init__(torch.bfloat16)


class DoubleHead(Network):
    """A head of float64 on a body of float32."""

    def __init__(self):
        super().__init__()
        self.head.double()

    def forward(self, batch):
        x = self.second(self.first(batch["image"] / 255)) * self.gain + self.frozen.sum()
        return self.head(torch.relu(self.third(x.flatten(1))).double())


class Mixed(Network):
    """Three dtypes in one block, and two in one module."""

    def __init__(self):
        super().__init__()
        self.second = nn.Sequential(
            Cast(nn.Conv2d(5, 5, 1), torch.float64), nn.Conv2d(5, 7, 3), Cast(nn.Conv2d(7, 7, 1), torch.bfloat16)
        )
        self.third.bias.data = self.third.bias.data.double()
        self.gain.data = self.gain.data.double()

    def forward(self, batch):
        x = self.second(self.first(batch["image"] / 255)) * self.gain + self.frozen.sum()
        x = F.dropout(x.flatten(1), 0.1, self.training)
        x = (F.linear(x.float(), self.third.weight) + self.third.bias).float()
        return self.head(torch.relu(x))

    def blocks(self):
        return [self.first, self.second, self.head]


EVERYWHERE = {
    "ddp": [(2, {}), (3, {})],
    "fsdp": [(1, {}), (2, {}), (3, {"reshard": False})],
    "pipeline": [(2, {}), (4, {"stages": 2})],
}
FEW = {"fsdp": [(2, {})], "pipeline": [(2, {})]}


@pytest.mark.parametrize(
    ("model", "spread"),
    [
        (Mixed, EVERYWHERE),
        *((each, FEW) for each in (Doubled, Halves, DoubleHead)),
        *further(*((each, EVERYWHERE) for each in (Doubled, Halves, DoubleHead))),
    ],
)
def test_every_strategy_gives_the_bits_of_one_process(ranks, model, spread):
    (expected,) = ranks(1, trained, (model, images), "single", {}, {})
    for kind, layouts in spread.items():
        for world, config in layouts:
            for rank, found in enumerate(ranks(world, trained, (model, images), kind, config, {})):
                for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                    assert one == other, (kind, world, config, rank, number)


def plain_and_ours(model):
    """Weights after three steps, of ours and of a plain loop over whole batches that clips."""
    state, fetched, _ = prepared((model, images), "single", {}, {"ema": None})
    model, plain = state.strategy.model, state.strategy.model.__class__()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in plain.parameters() if p.requires_grad and p.ndim < 2], "weight_decay": 0.0},
        ]
    )
    norms = []
    for micro_batches in fetched(state.strategy.owned, 0, 3).steps():
        norms.append(float(step(state, micro_batches, clip=0.01).norm))
        for group, ours in zip(optimizer.param_groups, state.optimizer.param_groups, strict=False):
            group["lr"] = ours["lr"]
        losses = [plain.loss(plain(each.batch), each.batch) for each in micro_batches]
        (sum(each.total for each in losses) / sum(each.count for each in losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert norms[-1] == pytest.approx(float(norm), rel=1e-12 if norm.dtype == torch.float64 else 1e-5)
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (p.detach().clone(), dict(plain.named_parameters())[name].detach())
        for name, p in model.named_parameters()
    }


class Smooth(Doubled):
    """Without what depends on the micro-batch's seed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU()).double()
        self.second = nn.Sequential(nn.Conv2d(5, 7, 3), nn.ReLU()).double()

    def forward(self, batch):
        x = self.second(self.first(batch["image"].double() / 255)) * self.gain + self.frozen.sum()
        return self.head(torch.relu(self.third(x.flatten(1))))


def test_clipped_training_in_float64_is_that_of_a_plain_loop(ranks):
    (found,) = ranks(1, plain_and_ours, Smooth)
    for ours, theirs in found.values():
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
