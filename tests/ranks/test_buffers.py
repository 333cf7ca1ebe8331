"""Buffers that a forward pass changes: the same bits on every world and strategy, in training and after evaluation."""

import pytest
import torch
from places import OWN
from strategy_runs import Network, images, trained
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from training_runs import config_in, run_on_rank

from lockstep.base.errors import LockstepError
from lockstep.core.modules.buffer_rules import declare
from lockstep.core.modules.buffers import copied_buffers
from lockstep.core.modules.tracked_buffer import TrackedBuffer

LAYOUTS = [
    ("ddp", 2, {}),
    ("ddp", 3, {}),
    ("fsdp", 1, {}),
    ("fsdp", 3, {}),
    ("pipeline", 2, {}),
    ("pipeline", 4, {"stages": 2}),
]
EVERY = [
    ("ddp", 5, {}),
    ("ddp", 8, {}),
    ("fsdp", 2, {}),
    ("fsdp", 4, {"replicas": 2}),
    ("pipeline", 1, {}),
    ("pipeline", 3, {"cut": [1, 2]}),
    ("pipeline", 2, {"schedule": "interleaved"}),
]


class Following(nn.Module):
    """Subtracts a running mean, which it also follows in evaluation, as many a stranger's module does."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_started", torch.zeros((), dtype=torch.bool))
        self.register_buffer("constant", torch.linspace(0, 1, width))

    def forward(self, x):
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # another tensor each time
            self.seen += len(x)
            self.is_started.fill_(True)
        return x - self.mean + self.constant / (1 + self.seen)


class Queue(nn.Module):
    """Keeps the last features it was given and adds their mean; written past autograd's count of changes."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, width))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("rare", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        out = x + self.queue.mean(0)
        place = int(self.place) % 6
        self.queue.data[place] = x.detach().mean(0)
        self.place.data.add_(1)
        if float(x.detach().sum()) > 12:  # in some micro-batches only, and perhaps late
            self.rare += float(x.detach().max())
        return out


class Stateful(Network):
    """The network with changing buffers in three of its blocks."""

    def __init__(self):
        super().__init__()
        self.first.append(nn.Sequential(nn.Flatten(1), Following(5 * 36), nn.Unflatten(1, (5, 6, 6))))
        self.third = nn.Sequential(spectral_norm(nn.Linear(7 * 16, 31)), Queue(31))
        self.head = nn.Sequential(nn.Linear(31, 10), Following(10))
        declare(self, {"third.1.queue": "in_order"})


def compared(ranks, task, layouts, train):
    (expected,) = ranks(1, trained, task, "single", {}, train)
    for kind, world, config in layouts:
        for rank, found in enumerate(ranks(world, trained, task, kind, config, train)):
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert one == other, (kind, world, config, rank, number)


@pytest.mark.parametrize(
    "train",
    [pytest.param({}, id="plain", marks=pytest.mark.matrix), pytest.param({"recompute": True}, id="recomputed")],
)
def test_buffers_are_the_same_bits_everywhere(ranks, train):
    compared(ranks, (Stateful, images), LAYOUTS, train)


@pytest.mark.matrix
@pytest.mark.parametrize("train", [{}, {"recompute": True}, {"precision": "bf16"}])
def test_buffers_on_many_layouts(ranks, train):
    compared(ranks, (Stateful, images), [*LAYOUTS, *EVERY], train)


def test_what_cannot_be_joined_is_named_and_the_summary_says_so(ranks, tmp_path):
    model = {"kind": "user", "file": str(OWN / "growing.py"), "options": {"saved": False}}
    summary = ranks(2, run_on_rank, config_in(tmp_path, "a", model=model))[0]
    sentences = [finding["what"] for finding in summary["findings"] if finding["kind"] == "buffer"]
    assert any("network.history changes its shape or type in Growing" in each for each in sentences)
    assert any("growing.py:" in each for each in sentences)
    assert any("network.hidden changes in training, but is no part of a checkpoint" in each for each in sentences)
    assert summary["digest_depends_on_world"] in sentences


@pytest.mark.parametrize("world", [1, 2])
def test_a_saved_buffer_of_no_fixed_shape_is_refused(ranks, tmp_path, world):
    model = {"kind": "user", "file": str(OWN / "growing.py"), "options": {"saved": True}}
    message = ranks(world, run_on_rank, config_in(tmp_path, "a", model=model))[0]
    assert message.startswith("ModelError: the buffer network.history changes its shape or type"), message
    assert "growing.py:" in message and "persistent=False" in message


class Late(Network):
    """A buffer that changes in every step, and its shape in a later one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, batch):
        if self.training and torch.is_grad_enabled():
            self.seen += 1
            if self.seen[0] > 15:
                self.seen = torch.zeros(2, dtype=torch.int64)
        return super().forward(batch)


def refused_on_rank(kind):
    try:
        trained((Late, images), kind, {}, {})
    except LockstepError as error:
        return str(error)
    return "no error"


def test_a_shape_that_changes_late_is_told(ranks):
    (message,) = ranks(1, refused_on_rank, "single")
    assert message.startswith("the buffer seen changes its shape or type in the forward pass (Late")


def test_a_forward_pass_on_trial_leaves_no_trace():
    model = nn.Sequential(nn.BatchNorm1d(3), Following(3), Queue(3))
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with copied_buffers(model):
        model(torch.randn(4, 3))
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_statistics_of_a_batchnorm_without_a_counter_are_written():
    """PyTorch does not count these writes."""
    for layer in (nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)):
        layer.num_batches_tracked = None
        buffer = TrackedBuffer("running_mean", layer, "running_mean")
        assert not buffer.is_written
        layer(torch.randn(4, 3, 5))
        assert buffer.is_written
