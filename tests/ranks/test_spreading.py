"""Models that make trouble when they are spread: each gives the bits of one process, or says why it cannot."""

import pytest
import torch
from strategy_runs import CPU, SHARDS, Chain
from torch import nn

from lockstep.base.errors import LockstepError
from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.distributed.process_group import world_group
from lockstep.core.modules.deferred_init import deferred
from lockstep.core.numerics.digest import digest_of, world_lines
from lockstep.core.numerics.seeds import seed_all
from lockstep.recipe import build as assembly
from lockstep.recipe import recipe as recipes
from lockstep.training.step import step


class InPlace(Chain):
    """Changes what a block gives, and reads a constant that was made from numbers."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]))
        self.register_buffer("shift", torch.tensor([0.1]))

    def forward(self, batch):
        x = batch["x"] * self.gain
        for layer in self.layers:
            x = layer(x)
            x += self.shift
            x = torch.relu_(x)
        return self.head(x)


class TwoHeads(Chain):
    """Returns a dict; what both heads take is made between the blocks."""

    def __init__(self):
        super().__init__()
        self.size = nn.Linear(8, 1)

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = torch.relu(layer(x))
        return {"logits": self.head(x), "size": self.size(x)}

    def loss(self, outputs, batch):
        found = super().loss(outputs["logits"], batch)
        return LossSum(found.total + outputs["size"].square().sum(), found.count)

    def blocks(self):
        return [*super().blocks(), self.size]


class Packed(Chain):
    """A block gives a PackedSequence."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, batch):
        x = self.layers[0](batch["x"])
        packed, _ = self.gru(nn.utils.rnn.pack_padded_sequence(x[:, None], [1] * len(x), batch_first=True))
        return self.head(nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0][:, 0])

    def blocks(self):
        return [self.layers[0], self.gru, self.head]


class OwnGenerator(Chain):
    """Draws its weights from a generator of its own."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for layer in self.layers:
            nn.init.normal_(layer.weight, generator=generator)


class Hidden(Chain):
    """Keeps a tensor as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.scales = torch.arange(1.0, 9.0)

    def forward(self, batch):
        return super().forward({"x": batch["x"] * self.scales})


class Twice(Chain):
    """Enters a block twice."""

    def forward(self, batch):
        return self.head(torch.tanh(self.layers[0](super().blocks()[0](batch["x"]))))

    def blocks(self):
        return [self.layers[0], self.head]


class Splitting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y, (y > 0).float().detach()


class Masked(Chain):
    """The first block gives a mask, through which no gradient goes, and all later ones take it."""

    def __init__(self):
        super().__init__()
        self.layers[0] = Splitting()

    def forward(self, batch):
        x, mask = self.layers[0](batch["x"])
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) * mask
        return self.head(x)


class WeighedLoss(Chain):
    """Learns a temperature in its loss."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def loss(self, outputs, batch):
        return super().loss(outputs * self.temperature, batch)


def trained(model, kind, config, is_deferred):
    """Two steps -> the digest of the weights, or what was said."""

    def build():
        seed_all(3)
        return model()

    generator = torch.Generator().manual_seed(0)
    batches = [
        {"x": torch.randn(3, 8, generator=generator), "label": torch.randint(0, 3, (3,), generator=generator)}
        for _ in range(SHARDS)
    ]
    recipe = recipes.Recipe.model_validate({"parallel": {"kind": kind, **config}, "optim": {"lr": 0.1}})
    every = frozenset(range(SHARDS))
    try:
        built = (deferred(build) if is_deferred else None) or build()
        state = assembly.distribute(recipe, built, lambda: batches[0], total_steps=9, device=CPU)
        for number in range(2):
            micro_batches = [
                MicroBatch(
                    step=number,
                    shard=shard or 0,
                    ghost=shard is None,
                    indices=(0, 1, 2),
                    batch=batches[shard or 0],
                    shards=SHARDS,
                    present=every,
                )
                for shard in state.strategy.owned(SHARDS, every)
            ]
            step(state, micro_batches, clip=1.0)
    except LockstepError as error:
        return str(error)
    return digest_of(world_lines(state.strategy.state(), world_group()))


@pytest.mark.parametrize("model", [Chain, InPlace, TwoHeads, OwnGenerator, Hidden])
def test_awkward_models_keep_their_bits(ranks, model):
    (expected,) = ranks(1, trained, model, "single", {}, False)
    assert len(expected) == 64
    for kind in ("fsdp", "pipeline"):
        assert set(ranks(2, trained, model, kind, {}, True)) == {expected}, kind


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize(
    ("model", "kind", "word"),
    [
        (Twice, "pipeline", "more than once: name others in blocks()"),
        (Packed, "pipeline", "block 1 gives a PackedSequence, whose shapes depend on the samples"),
        (Masked, "pipeline", "uses what block 0 gives, past those between them"),
        (WeighedLoss, "pipeline", "the loss uses weights of its own"),
        (WeighedLoss, "fsdp", "the loss uses weights of its own"),
    ],
)
def test_what_would_be_wrong_is_refused(ranks, model, kind, word, is_deferred):
    config = {"cut": [2]} if model is Masked else {}
    for message in ranks(2, trained, model, kind, config, is_deferred):
        assert word in message


def test_a_mask_does_not_hinder_other_cuts(ranks):
    (expected,) = ranks(1, trained, Masked, "single", {}, False)
    assert set(ranks(2, trained, Masked, "pipeline", {"cut": [1]}, True)) == {expected}
