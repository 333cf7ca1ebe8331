"""The gradient is the whole batch's, whatever the split: ragged, uneven, on fewer or more processes than shards."""

import gc

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.base import plugins
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import LossSum, Model
from lockstep.core.numerics.digest import digest
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness, seed_all
from lockstep.data.in_memory import Images
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.sampler import TrainingRequests

CPU = torch.device("cpu")


class Net(Model):
    """Small, with everything that makes trouble: convolution, optional BatchNorm and dropout."""

    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6 * 16, 10)

    def forward(self, batch):
        x = batch["image"].to(self.head.weight.dtype) / 255
        x = self.dropout(torch.relu(self.norm(self.convolution(x))))
        return self.head(torch.relu(self.second(x)).flatten(1))

    def loss(self, outputs, batch):
        total = F.cross_entropy(outputs, batch["label"], reduction="sum")
        return LossSum(total, len(outputs), {"accuracy": (outputs.argmax(1) == batch["label"]).sum()})

    def blocks(self):
        return [self.convolution, self.norm, self.dropout, self.second, self.head]


def images(count):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Images(pixels, generator.integers(0, 10, count), [str(d) for d in range(10)])


def steps_on_rank(kind, order, numbers, options):
    """Run some steps without an optimizer: (sum of gradients by name, loss, state) of each, and the state's digest."""
    seed_all(0)
    model = Net(**options.get("model", {})).to(options.get("dtype", torch.float32))
    if options.get("channels_last"):
        model.to(memory_format=torch.channels_last)
    randomness = Randomness(0)
    randomness.watch(model.blocks())
    module = plugins.implementation("parallel.strategies", kind)
    config = module.Config(kind=kind, **options.get("config", {}))
    precision = Precision(options.get("precision", "fp32"), CPU)
    strategy = module.build(config, randomness=randomness, precision=precision, exact=options.get("exact", True))
    strategy.place(model, dict)
    found = []
    for number in numbers:
        requests = TrainingRequests(order=order, owned=strategy.owned, start=number, stop=number + 1)
        loader = Loader(images(order.samples), requests, seed=0, pad_id=0, workers=0, device=CPU)
        loss = strategy.forward_backward(next(loader.steps()))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = strategy.norm()
        found.append((gradients, float(loss.total), int(loss.count), float(loss.sums["accuracy"]), float(norm)))
        model.zero_grad()
    return found, digest(strategy.state())


def whole_batch(order, number):
    """The reference: one forward and backward of all samples of a step at once, in float64."""
    seed_all(0)
    model = Net().double()
    source = images(order.samples)
    rows = np.concatenate(order.shards(number))
    batch = {name: torch.as_tensor(column) for name, column in source.__getitems__(rows).items()}
    loss = model.loss(model(batch), batch)
    loss.total.backward()
    return {n: p.grad for n, p in model.named_parameters()}, float(loss.total.detach()), len(rows)


def ragged():
    """1,003 samples, steps of 128 in micro-batches of 16: the last step of an epoch holds 107."""
    return Order(seed=3, samples=1003, global_batch=128, micro_batch=16)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("exact", [True, False])
def test_gradient_of_the_ragged_tail_is_the_whole_batchs(ranks, world, exact):
    order = ragged()
    numbers = [0, order.steps_per_epoch - 1]
    options = {"dtype": torch.float64, "exact": exact}
    for found, _ in ranks(world, steps_on_rank, "ddp", order, numbers, options):
        for number, (gradients, total, count, _, _) in zip(numbers, found, strict=True):
            expected, loss, samples = whole_batch(order, number)
            assert count == samples
            assert total == pytest.approx(loss, rel=1e-12)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"model": {"dropout": 0.5}}, id="dropout"),
        pytest.param({"model": {"norm": True, "dropout": 0.3}}, id="batchnorm"),
        pytest.param({"precision": "bf16", "model": {"dropout": 0.5}}, id="bf16"),
        pytest.param({"config": {"bucket_mb": 0.001}}, id="many buckets"),
        pytest.param({"channels_last": True}, id="channels last"),
    ],
)
def test_bits_do_not_depend_on_the_number_of_processes(ranks, options):
    order = Order(seed=3, samples=203, global_batch=100, micro_batch=16)
    alone = {k: v for k, v in options.items() if k != "config"}
    ((expected, state),) = ranks(1, steps_on_rank, "single", order, [0, 1, 2], alone)
    for world in (1, 2, 3, 4):
        for found, own_state in ranks(world, steps_on_rank, "ddp", order, [0, 1, 2], options):
            assert own_state == state, world
            for mine, theirs in zip(found, expected, strict=True):
                assert mine[1:] == theirs[1:], world
                assert all(torch.equal(mine[0][name], theirs[0][name]) for name in mine[0]), world


def test_more_processes_than_shards(ranks):
    order = Order(seed=3, samples=40, global_batch=20, micro_batch=10)
    ((expected, _),) = ranks(1, steps_on_rank, "single", order, [0, 1], {})
    for exact in (True, False):
        for found, _ in ranks(4, steps_on_rank, "ddp", order, [0, 1], {"exact": exact}):
            for mine, theirs in zip(found, expected, strict=True):
                assert mine[2] == theirs[2] == 20
                for name, gradient in mine[0].items():
                    torch.testing.assert_close(gradient, theirs[0][name])


def test_batchnorm_statistics_are_the_mean_over_shards(ranks):
    order = Order(seed=3, samples=64, global_batch=64, micro_batch=16)
    seed_all(0)
    model = Net(norm=True)
    source, means = images(64), []
    for rows in order.shards(0):
        batch = {name: torch.as_tensor(column) for name, column in source.__getitems__(rows).items()}
        means.append(model.convolution(batch["image"] / 255).mean((0, 2, 3)))
    expected = 0.1 * torch.stack(means).mean(0)
    for found in ranks(2, running_mean_on_rank, order):
        torch.testing.assert_close(found, expected)


def running_mean_on_rank(order):
    seed_all(0)
    model = Net(norm=True)
    module = plugins.implementation("parallel.strategies", "ddp")
    strategy = module.build(
        module.Config(kind="ddp"), randomness=Randomness(0), precision=Precision("fp32", CPU), exact=True
    )
    strategy.place(model, dict)
    requests = TrainingRequests(order=order, owned=strategy.owned, start=0, stop=1)
    strategy.forward_backward(next(Loader(images(64), requests, seed=0, pad_id=0, workers=0, device=CPU).steps()))
    assert int(model.norm.num_batches_tracked) == 1
    return model.norm.running_mean.clone()


def test_single_refuses_company(ranks):
    for message in ranks(2, place_single_on_rank):
        assert "parallel.kind=ddp" in message


def place_single_on_rank():
    module = plugins.implementation("parallel.strategies", "single")
    strategy = module.build(
        module.Config(kind="single"), randomness=Randomness(0), precision=Precision("fp32", CPU), exact=True
    )
    try:
        strategy.place(Net(), dict)
    except Exception as error:
        return str(error)
    return f"no error with {dist.get_world_size()} processes"


class Choosy(Net):
    """Some parameters take part in some micro-batches only: those whose first label is even."""

    def __init__(self, **_):
        super().__init__()
        self.extra = nn.Linear(10, 10)

    def forward(self, batch):
        outputs = super().forward(batch)
        return self.extra(outputs) if int(batch["label"][0]) % 2 == 0 else outputs


def choosy_on_rank(kind, order, config):
    seed_all(0)
    model = Choosy()
    module = plugins.implementation("parallel.strategies", kind)
    strategy = module.build(
        module.Config(kind=kind, **config), randomness=Randomness(0), precision=Precision("fp32", CPU), exact=True
    )
    strategy.place(Net(), dict)  # a strategy can be given another model: nothing of the first may be left
    strategy.place(model, dict)
    strategy.place(model, dict)
    found = []
    requests = TrainingRequests(order=order, owned=strategy.owned, start=0, stop=4)
    for step in Loader(images(order.samples), requests, seed=0, pad_id=0, workers=0, device=CPU).steps():
        strategy.forward_backward(step)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return found


def test_parameters_that_only_some_shards_use(ranks):
    order = Order(seed=5, samples=160, global_batch=40, micro_batch=8)
    (expected,) = ranks(1, choosy_on_rank, "single", order, {})
    reference, source = Choosy(), images(160)
    for number in range(4):
        seed_all(0)
        reference = Choosy()
        for rows in order.shards(number):
            batch = {name: torch.as_tensor(column) for name, column in source.__getitems__(rows).items()}
            reference.loss(reference(batch), batch).total.backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(expected[number][name], parameter.grad)
    for world in (1, 2, 3):
        for found in ranks(world, choosy_on_rank, "ddp", order, {"find_unused": True}):
            for mine, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in theirs), world


class Idle(Net):
    """A layer that takes part in nothing."""

    def __init__(self):
        super().__init__(norm=True)
        self.extra = nn.Linear(10, 10)


def unused_on_rank(order, exact):
    module = plugins.implementation("parallel.strategies", "ddp")
    config = module.Config(kind="ddp", bucket_mb=0.001)
    strategy = module.build(config, randomness=Randomness(0), precision=Precision("fp32", CPU), exact=exact)
    strategy.place(Idle(), dict)
    requests = TrainingRequests(order=order, owned=strategy.owned, start=0, stop=1)
    try:
        for step in Loader(images(order.samples), requests, seed=0, pad_id=0, workers=0, device=CPU).steps():
            strategy.forward_backward(step)
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("exact", [True, False])
def test_unused_parameters_are_explained(ranks, exact):
    """In the very step, whose gradients would not be whole: before anything is made of them."""
    order = Order(seed=5, samples=160, global_batch=40, micro_batch=8)
    for message in ranks(2, unused_on_rank, order, exact):
        assert "(extra.weight, extra.bias): set parallel.find_unused=true" in message


def threads():
    """Of this process, once what nobody holds is gone."""
    gc.collect()
    return psutil.Process().num_threads()


@pytest.mark.parametrize("exact", [True, False])
def test_a_strategy_that_is_let_go_leaves_no_thread(ranks, exact):
    """Its process groups and its background have threads of their own, of which a lost one would spin for good."""
    train = ("ddp", ragged(), [0, 1], {"exact": exact})
    ranks(2, steps_on_rank, *train)
    before = ranks(2, threads)
    for _ in range(2):
        ranks(2, steps_on_rank, *train)
    assert ranks(2, threads) == before
