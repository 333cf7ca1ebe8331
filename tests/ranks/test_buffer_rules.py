"""Buffers that are no statistics: declared, they have the value that one process leaves in them, which runs the shards
one after the other; not declared, they are refused by name."""

import pytest
import torch
from members import further
from strategy_runs import Network, images, prepared
from torch import nn

from lockstep.base.errors import LockstepError
from lockstep.core.modules.buffer_rules import declare
from lockstep.training.step import step

LAYOUTS = [
    ("single", 1, {}),
    ("ddp", 2, {}),
    ("ddp", 3, {}),
    ("fsdp", 2, {}),
    ("fsdp", 3, {}),
    ("fsdp", 4, {"replicas": 2}),
    ("pipeline", 2, {}),
    ("pipeline", 4, {"stages": 2}),
    ("pipeline", 2, {"schedule": "interleaved"}),
]
FEW = [("ddp", 2, {}), ("fsdp", 3, {}), ("pipeline", 2, {})]


class Keys(nn.Module):
    """What MoCo keeps: a queue of keys, and where the next ones go."""

    NAMES = "queue", "pointer"

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 10))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def update(self, x):
        places = (int(self.pointer) + torch.arange(len(x))) % self.queue.shape[1]
        self.queue[:, places] = x[:, :4].T
        self.pointer.copy_((self.pointer + len(x)) % self.queue.shape[1])


class Range(nn.Module):
    """What quantisation keeps: the range seen so far, and the integer that stands for zero."""

    NAMES = "low", "high", "zero"

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(4))
        self.register_buffer("high", torch.zeros(4))
        self.register_buffer("zero", torch.zeros(4, dtype=torch.int32))

    def update(self, x):
        x = x[:, :4] - 0.3
        self.low = torch.minimum(self.low, x.amin(0))
        self.high.copy_(torch.maximum(self.high, x.amax(0)))
        self.zero.copy_((-255 * self.low / (self.high - self.low + 1e-6)).round())


class Ring(nn.Module):
    """The last losses of each class, as samplers keep them, in half precision, and a switch."""

    NAMES = "losses", "is_odd"

    def __init__(self):
        super().__init__()
        self.register_buffer("losses", torch.ones(3, 2, dtype=torch.float16))
        self.register_buffer("is_odd", torch.zeros(3, dtype=torch.bool))

    def update(self, x):
        self.losses.data[len(x) % 3, int(self.is_odd[0])] = x.sum()
        self.is_odd.data.logical_not_()


KINDS = {kind.__name__: kind for kind in (Keys, Range, Ring)}


class Keeping(Network):
    """The network with one of these between its blocks' layers, of what depends on the data alone."""

    def __init__(self, kept, rule=None):
        super().__init__()
        self.first.insert(0, Kept(kept))
        declare(self, {} if rule is None else {f"first.0.kept.{kept.NAMES[0]}": rule})


class Kept(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept()

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.kept.update(x.flatten(1).float())
        return x


def kept_on_rank(name, rule, kind, config):
    """Each of four steps -> the buffers after it, on this rank; or the error."""
    state, fetched, _ = prepared((lambda: Keeping(KINDS[name], rule), images), kind, config, {})
    found = []
    for micro_batches in fetched(state.strategy.owned, 0, 4).steps():
        try:
            step(state, micro_batches, clip=0.5)
        except LockstepError as error:
            return str(error)
        tensors = state.strategy.state()
        keys = [key for key in tensors if ".kept." in key]
        found.append({key.rpartition(".")[2]: tensors[key].tolist() for key in sorted(keys)})
    return found


def expected(name):
    """Plain PyTorch, on all shards one after the other."""
    _, fetched, _ = prepared((Network, images), "single", {}, {})
    kept, found = KINDS[name](), []
    for micro_batches in fetched(lambda _, present: sorted(present), 0, 4).steps():
        for micro_batch in micro_batches:
            kept.update(micro_batch.batch["image"].flatten(1) / 255)
        found.append({key: value.tolist() for key, value in sorted(kept.named_buffers())})
    return found


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("Keys", LAYOUTS), ("Range", FEW), ("Ring", FEW), *further(("Range", LAYOUTS), ("Ring", LAYOUTS))],
)
def test_in_order_leaves_what_one_process_leaves(ranks, name, layouts):
    (plain,) = ranks(1, expected, name)
    for kind, world, config in layouts:
        for rank, found in enumerate(ranks(world, kept_on_rank, name, "in_order", kind, config)):
            assert found == plain or (kind == "pipeline" and found == [{}] * 4), (kind, world, config, rank)
        assert kind != "pipeline" or ranks(world, kept_on_rank, name, "in_order", kind, config)[0] == plain


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("kind", "world"), [("single", 1), ("ddp", 2)])
def test_not_declared_they_are_refused(ranks, name, kind, world):
    message = ranks(world, kept_on_rank, name, None, kind, {})[0]
    assert any(f"the buffer first.0.kept.{key} ({name}, " in message for key in KINDS[name].NAMES), message
    assert ".kept." in message and '": "in_order"}' in message


def test_frozen_is_not_changed(ranks):
    for rank in ranks(2, kept_on_rank, "Keys", "frozen", "ddp", {}):
        assert rank == "" or "pointer" in rank
