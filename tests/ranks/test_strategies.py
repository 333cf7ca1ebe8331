"""Every strategy against one process with the whole model: step for step, the same bits of everything."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from members import further
from strategy_runs import TASKS, Network, images, prepared, trained
from torch import nn

from lockstep.base import plugins
from lockstep.base.errors import LockstepError
from lockstep.core.numerics.seeds import seed_all
from lockstep.core.reduction import reduce_scatter
from lockstep.parallel.strategies import _fsdp

LAYOUTS = {
    "single": [(1, {})],
    "ddp": [(2, {}), (3, {}), (4, {})],
    "fsdp": [(1, {}), (2, {}), (3, {}), (4, {}), (4, {"replicas": 2}), (2, {"reshard": False})],
    "pipeline": [
        (1, {}),
        (2, {}),
        (2, {"schedule": "gpipe"}),
        (1, {"schedule": "interleaved"}),
        (2, {"schedule": "interleaved"}),
        (2, {"stages": 1}),
        (3, {"cut": [1, 2]}),
        (4, {"stages": 2}),
    ],
    "tensor": [],
}
"""Strategy -> (processes, settings); a mesh of 2 x 2 among them. tensor keeps to a tolerance: see test_tensor.py."""
assert LAYOUTS.keys() == set(plugins.names("parallel.strategies"))


def trained_on_machines(machine_of, *args):
    """Train as ranks of several machines -> (state of each step, number of exchanges between machines)."""
    usual, count = (_fsdp.this_machine, reduce_scatter.added_by_machine), 0

    def counted(*args):
        nonlocal count
        count += 1
        return usual[1](*args)

    _fsdp.this_machine, reduce_scatter.added_by_machine = lambda: machine_of[dist.get_rank()], counted
    try:
        return trained(*args), count
    finally:
        _fsdp.this_machine, reduce_scatter.added_by_machine = usual


@pytest.mark.parametrize(
    ("machine_of", "config"),
    [("abab", {}), ("aabbccdd", {"replicas": 2}), ("aab", {}), *further(("aabb", {}), ("aabb", {"replicas": 2}))],
)
def test_machines_that_add_first_give_the_bits_of_one_process(ranks, machine_of, config):
    (expected,) = ranks(1, trained, "images", "single", {}, {})
    of_replica = machine_of[: len(machine_of) // config.get("replicas", 1)]
    has_table = len(of_replica) == 4
    for found, count in ranks(len(machine_of), trained_on_machines, machine_of, "images", "fsdp", config, {}):
        assert found == expected
        assert bool(count) == has_table


RECOMPUTED, SCALED = {"precision": "bf16", "recompute": True}, {"precision": "fp16"}
FEW = {"ddp": [(3, {})], "fsdp": [(2, {})], "pipeline": [(2, {"schedule": "interleaved"})]}
EVERY = [
    pytest.param(task, train, LAYOUTS, marks=pytest.mark.matrix) for task in TASKS for train in ({}, RECOMPUTED, SCALED)
]


@pytest.mark.core
@pytest.mark.parametrize(
    ("task", "train", "layouts"),
    [("images", {}, LAYOUTS), ("images", SCALED, FEW), ("texts", RECOMPUTED, FEW), *EVERY],
)
def test_every_strategy_gives_the_bits_of_one_process(ranks, task, train, layouts):
    (expected,) = ranks(1, trained, task, "single", {}, train)
    for kind in layouts:
        for world, config in layouts[kind]:
            for rank, found in enumerate(ranks(world, trained, task, kind, config, train)):
                for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                    assert one == other, (kind, world, config, rank, number)


COMPILED = {"precision": "bf16", "compile": True}


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("task", "layouts"),
    [("images", {"ddp": [(2, {}), (3, {})], "fsdp": [(2, {})]}), ("texts", {"ddp": [(2, {})]})],
)
def test_compiled_blocks_give_the_same_bits_whatever_a_rank_meets_first(ranks, task, layouts, tmp_path, monkeypatch):
    """Each run compiles anew. Texts have many shapes, and the last step is ragged: ranks meet others first."""

    def compiled(world, kind, config):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"{kind}-{world}"))
        return ranks(world, trained, task, kind, config, COMPILED)

    (expected,) = compiled(1, "single", {})
    for kind in layouts:
        for world, config in layouts[kind]:
            for rank, found in enumerate(compiled(world, kind, config)):
                for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                    assert one == other, (kind, world, config, rank, number)
    assert ranks(1, trained, task, "single", {}, {"precision": "bf16"}) != [expected]


class Sampling(Network):
    """Draws random numbers in evaluation, too, in blocks and between them."""

    def forward(self, batch):
        x = F.dropout(self.second(F.dropout(self.first(batch["image"] / 255), 0.3)), 0.3) * np.random.rand()
        return self.head(F.dropout(torch.relu(self.third(x.flatten(1))), 0.3) + random.random())


def drawn(kind, config, seed=None):
    """What a rank's forward pass gives in evaluation, and the numbers that are drawn next."""
    state, _, sample = prepared((Sampling, images), kind, config, {})
    batch = sample()
    with state.for_use():
        seed_all(dist.get_rank() if seed is None else seed)
        return state.strategy.forward(batch).tolist(), torch.rand(2).tolist(), np.random.rand(), random.random()


def test_every_strategy_draws_the_same_numbers_in_evaluation(ranks):
    alone = [ranks(1, drawn, "single", {}, rank)[0] for rank in range(4)]
    assert len({str(each) for each in alone}) == 4
    for kind, layouts in LAYOUTS.items():
        for world, config in layouts:
            assert ranks(world, drawn, kind, config) == alone[:world], (kind, world, config)


def test_recomputing_changes_no_bit(ranks):
    for task in TASKS:
        plain, recomputed = (ranks(2, trained, task, "ddp", {}, {"recompute": each}) for each in (False, True))
        assert plain == recomputed


def test_gathering_in_bf16_is_told_and_does_not_depend_on_the_world(ranks):
    settings = {"gather": "bf16"}
    assert plugins.find("parallel.strategies", "fsdp").Config(kind="fsdp", **settings).numeric(2) == {"gather": "bf16"}
    (expected,) = ranks(1, trained, "texts", "single", {}, {})
    found = [ranks(world, trained, "texts", "fsdp", settings, {})[0] for world in (2, 3)]
    assert found[0] == found[1] != expected


def held_on_rank(kind, config):
    state, *_ = prepared("texts", kind, config, {})
    parts = sum(p.numel() for p in state.module.parameters())
    moments = sum(t.numel() for values in state.optimizer.state.values() for t in values.values() if t.ndim)
    return parts, moments


def test_what_is_spread_takes_less_of_each(ranks):
    ((whole, _),) = ranks(1, held_on_rank, "single", {})
    for kind in ("fsdp", "pipeline"):
        held = ranks(2, held_on_rank, kind, {})
        assert sum(parts for parts, _ in held) == whole
        assert all(moments == 2 * parts for parts, moments in held)
    assert max(parts for parts, _ in ranks(4, held_on_rank, "fsdp", {})) < 0.3 * whole


class Tied(Network):
    """The last block uses the first one's weights."""

    def forward(self, batch):
        return super().forward(batch) * self.first[0].weight.sum()


class Skipping(Network):
    """What the first block gives is used past the second."""

    def forward(self, batch):
        x = self.first(batch["image"] / 255)
        x = torch.cat([self.second(x).flatten(1), x.mean((2, 3))], 1)[:, 5:]
        return self.head(torch.relu(self.third(x)))


class Repeating(Network):
    """A block that is entered twice."""

    def forward(self, batch):
        return super().forward(batch) + super().forward(batch)


class Masked(Network):
    """The first block also gives a mask, without a gradient, which the last one asks for."""

    def forward(self, batch):
        self.first.register_forward_hook(lambda _, __, out: (out, (out > 0.1).float().mean().detach()))
        x, mask = self.first(batch["image"] / 255)
        self.first._forward_hooks.popitem()
        return self.head(torch.relu(self.third(self.second(x).flatten(1)))) * (1 + mask)


class Scalar(Network):
    """A weight that is a single number."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


class ChannelsLast(Network):
    """Weights that do not lie row by row."""

    def __init__(self):
        super().__init__()
        self.to(memory_format=torch.channels_last)


def refused_on_rank(model, kind, config):
    try:
        prepared((model, images), kind, config, {})
    except LockstepError as error:
        return str(error)
    return f"no error on {dist.get_world_size()} processes"


@pytest.mark.parametrize(
    ("model", "kind", "config", "word"),
    [
        (Tied, "pipeline", {}, "first.0.weight is used in blocks 0 and 3 alike"),
        (Skipping, "pipeline", {"cut": [2]}, "block 2 uses what block 0 gives"),
        (Repeating, "pipeline", {}, "of the 4 blocks with weights it enters"),
        (Masked, "pipeline", {"cut": [2]}, "the model gives other outputs"),
        (Network, "pipeline", {"cut": [5]}, "parallel.cut=[5] does not cut 4 blocks into 2 stages"),
        (Network, "pipeline", {"stages": 3}, "parallel.stages=3 does not divide the 2 processes"),
        (Network, "fsdp", {"replicas": 3}, "parallel.replicas=3 does not divide the 2 processes"),
        (Scalar, "fsdp", {}, "gain is a number without axes"),
        (ChannelsLast, "fsdp", {}, "second.0.weight is not contiguous"),
    ],
)
def test_what_cannot_be_spread_is_explained(ranks, model, kind, config, word):
    for message in ranks(2, refused_on_rank, model, kind, config):
        assert word in message
