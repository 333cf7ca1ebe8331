"""Random numbers belong to the shard, the block and the sample: whoever draws them, and after whatever else."""

import json
import pathlib
import random

import numpy as np
import pytest
import torch
from places import OWN
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_runs import config_in, run_on_rank

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError, ModelError, SampleError
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.tree import contiguous
from lockstep.data.augment import Augmented, augmented
from lockstep.data.data_config import DataSection
from lockstep.data.in_memory import Images
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.sampler import TrainingRequests
from lockstep.recipe import recipe as recipes
from lockstep.recipe.splits import open_splits

NOISY = str(OWN / "noisy.py")


MANY = pytest.mark.filterwarnings("ignore:This DataLoader will create")
"""PyTorch warns of more workers than cores."""


def owner(rank, world):
    return lambda shards, present: contiguous(rank, world, shards=shards, present=present) or [None]


def images(count=50):
    pixels = np.random.default_rng(0).integers(1, 256, (count, 1, 4, 4), dtype=np.uint8)
    return Images(pixels, np.arange(count) % 10, [str(digit) for digit in range(10)])


def drawing(sample):
    """Something from each generator, as new columns; the image is changed in place."""
    sample["image"][:] = 0
    return {**sample, "python": random.random(), "numpy": np.random.random(2), "torch": torch.rand(3)}


def epochs(source, *, workers=0, world=1, micro_batch=4, count=2):
    """What each sample became in each epoch: (epoch, index) -> its row of each column."""
    order = Order(seed=1, samples=len(source), global_batch=12, micro_batch=micro_batch)
    found = {}
    for rank in range(world):
        requests = TrainingRequests(order=order, owned=owner(rank, world), start=0, stop=count * order.steps_per_epoch)
        for micro_batch_ in Loader(source, requests, seed=1, pad_id=0, workers=workers, device=torch.device("cpu")):
            for place, index in enumerate(micro_batch_.indices):
                row = {name: column[place].tolist() for name, column in micro_batch_.batch.items()}
                found[order.epoch(micro_batch_.step), index] = row
    return found


@MANY
@pytest.mark.parametrize(
    "way", [{"workers": 1}, {"workers": 2}, {"workers": 4}, {"world": 3}, {"micro_batch": 5}], ids=str
)
def test_augmentation_belongs_to_the_sample_and_the_epoch(way):
    """Any number of workers and ranks, and even another micro-batch: the same sample comes out of it."""
    source = Augmented(images(), drawing, seed=1)
    plain = epochs(source)
    assert len(plain) == 100
    for name in ("python", "numpy", "torch"):
        assert len({str(row[name]) for row in plain.values()}) == 100  # no two samples, and no two epochs, are alike
    assert epochs(source, **way) == plain
    assert epochs(Augmented(images(), drawing, seed=2)) != plain


def test_augmentation_leaves_the_source_as_it_was():
    source = images()
    before = source.images.copy()
    found = epochs(Augmented(source, drawing, seed=1))
    assert not any(np.any(row["image"]) for row in found.values())
    assert np.array_equal(source.images, before)


class Rows:
    """Rows that differ in length, as tokens do."""

    spec, lengths = DataSpec(modality="text", labels=("a", "b")), np.array([3, 9, 5])

    def __len__(self):
        return 3

    def __getitems__(self, indices):
        return {"input_ids": [np.arange(1, self.lengths[i] + 1) for i in indices], "label": np.array(indices) % 2}


def test_rows_of_different_length_may_change_their_length():
    found = epochs(Augmented(Rows(), lambda row: {**row, "input_ids": row["input_ids"][1:]}, seed=1), count=1)
    assert [list(filter(None, found[0, i]["input_ids"])) for i in range(3)] == [
        [2, 3],
        [2, 3, 4, 5, 6, 7, 8, 9],
        [2, 3, 4, 5],
    ]


def test_an_error_in_augmentation_names_the_samples():
    def broken(sample):
        raise KeyError("no such column")

    with pytest.raises(SampleError, match=r"sample \d+ of the data could not be fetched") as caught:
        epochs(Augmented(images(), broken, seed=1))
    assert "KeyError: 'no such column'" in str(caught.value)


def test_a_file_without_augment_is_told(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    section = DataSection(kind="digits", augment=tmp_path / "a.py")
    trust.own([*trust.code_with_imports(tmp_path / "a.py"), *trust.code_with_imports(pathlib.Path(NOISY))])
    with pytest.raises(DataError, match=r"a\.py has no function augment\(sample\)"):
        augmented(images(), section, 0)
    assert isinstance(augmented(images(), DataSection(kind="digits", augment=NOISY), 0), Augmented)


def test_a_users_data_file_brings_its_own(tmp_path):
    """No setting is needed then; only training samples pass through it."""
    (tmp_path / "a.py").write_text(
        "import numpy as np\n"
        "from lockstep.data.in_memory import Images\n\n"
        "def source(options, split):\n"
        "    return Images(np.ones((9, 1, 8, 8), np.uint8), np.zeros(9, int), ['a', 'b'])\n\n"
        "def augment(sample):\n"
        "    return {**sample, 'image': sample['image'] + 1}\n"
    )
    recipe = recipes.Recipe.model_validate({"data": {"kind": "user", "file": str(tmp_path / "a.py"), "limit": 5}})
    trust.own(trust.code_with_imports(tmp_path / "a.py"))
    data = open_splits(recipe)
    assert isinstance(data.train, Augmented)
    assert not isinstance(data.test, Augmented)
    assert {tuple(np.unique(row["image"])) for row in epochs(data.train).values()} == {(2,)}
    assert np.all(data.test.__getitems__([0])["image"] == 1)


def test_the_same_weights_whoever_draws(ranks, tmp_path):
    """A user's model and augmentation that draw from every generator: processes and loader workers change nothing."""
    found = {}
    for world, workers, seed in ((1, 0, 0), (2, 1, 0), (3, 2, 0), (1, 4, 0), (1, 0, 1)):
        config = config_in(
            tmp_path,
            f"{world}-{workers}-{seed}",
            run={"dir": str(tmp_path), "name": f"{world}-{workers}-{seed}", "seed": seed},
            model={"kind": "user", "file": NOISY},
            data={"limit": 200, "workers": workers, "augment": NOISY},
            optim={"lr": 0.01},
        )
        found[world, workers, seed] = ranks(world, run_on_rank, config)[0]
    same = {key: value["digest"] for key, value in found.items() if key[2] == 0}
    assert len(set(same.values())) == 1, same
    assert found[1, 0, 1]["digest"] not in same.values()
    assert found[1, 0, 0]["evaluation"] == found[3, 2, 0]["evaluation"]
    assert "data.augment_sha256" in found[1, 0, 0]["numeric_recipe"]
    assert "data.augment" not in found[1, 0, 0]["numeric_recipe"]


class Drawing(nn.Module):
    """Remembers what it draws."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        self.drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
        return x * x * self.drawn[-1][2]


def test_a_block_draws_the_same_whoever_runs_the_others():
    blocks = [Drawing() for _ in range(3)]
    randomness = Randomness(5)
    randomness.watch(blocks)
    randomness.at(3, 1)
    for block in blocks:
        block(torch.ones(1))
    first = [block.drawn[-1] for block in blocks]
    assert len({number for row in first for number in row}) == 9
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    for block in reversed(blocks):  # as a pipeline's other ranks would: alone, in another order
        randomness.at(3, 1)
        block(torch.ones(1))
    assert [block.drawn[-1] for block in blocks] == first
    randomness.at(3, 2)
    blocks[0](torch.ones(1))
    assert not set(blocks[0].drawn[-1]) & set(first[0])


def test_each_step_and_shard_draws_numbers_of_its_own_outside_of_blocks():
    block, drawn = Drawing(), list[float]()
    randomness = Randomness(5)
    randomness.watch([block])
    for step, shard in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]:
        randomness.at(step, shard)
        drawn.append(torch.rand(1).item())
        block(torch.ones(1))
        drawn.append(torch.rand(1).item())
    assert drawn[:2] == drawn[-2:]
    assert len(set(drawn)) == 8


def test_recomputation_draws_the_same():
    """Activation checkpointing enters a block again in the backward pass; without the library's own help."""
    block, x = Drawing(), torch.ones(1, requires_grad=True)
    randomness = Randomness(5)
    randomness.watch([block])
    randomness.at(3, 1)
    checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert len(block.drawn) == 2
    assert block.drawn[0] == block.drawn[1]
    assert x.grad.item() == pytest.approx(2 * block.drawn[0][2])


def test_each_use_of_a_block_draws_numbers_of_its_own():
    block, after = Drawing(), []
    randomness = Randomness(5)
    randomness.watch([block])
    for _ in range(2):
        randomness.at(3, 1)
        for _ in range(3):
            block(torch.ones(1))
            after.append(torch.rand(1).item())
    assert block.drawn[:3] == block.drawn[3:]
    assert after[:3] == after[3:]
    assert len({number for row in block.drawn for number in row} | set(after)) == 12


class Repeated(nn.Module):
    """One layer, four times, as in ALBERT; recomputed by PyTorch in regions of the user's choice."""

    def __init__(self, **recompute):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.recompute = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), recompute

    def forward(self, x):
        def twice(x):
            return self.layer(x + self.layer(x))

        for _ in range(2):
            x = checkpoint(twice, x, **self.recompute) if self.recompute else twice(x)
        return x


def gradient_of(model, shards=(1,), **watched):
    """Of several shards whose backward passes come after all their forward passes, as in a pipeline."""
    randomness = Randomness(5)
    randomness.watch([model.layer], **watched)
    outputs = []
    for shard in shards:
        randomness.at(3, shard)
        outputs.append(model(torch.ones(4, 8, requires_grad=True)))
    for shard, output in zip(shards, outputs, strict=True):
        randomness.at(3, shard, returns=True)
        output.sum().backward()
    return model.layer[0].weight.grad


@pytest.mark.parametrize("shards", [(1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_finds_the_use_it_repeats(shards, reentrant):
    """To the bit, except that reentrant checkpoints add gradients in another order."""
    plain = gradient_of(Repeated(), shards)
    assert gradient_of(Repeated(), shards, recompute=True).equal(plain)
    for watched in ({}, {"recompute": True}):
        found = gradient_of(Repeated(use_reentrant=reentrant), shards, **watched)
        torch.testing.assert_close(found, plain, rtol=1e-5 if reentrant else 0, atol=1e-5 if reentrant else 0)


def test_recomputation_that_cannot_know_the_use_is_refused():
    with pytest.raises(ModelError, match=r"leave out preserve_rng_state=False"):
        gradient_of(Repeated(use_reentrant=False, preserve_rng_state=False))


STRATEGIES = {
    "single": (1, {"parallel": {"kind": "single"}}),
    "two": (2, {}),
    "three": (3, {}),
    "recompute": (2, {"train": {"recompute": True}}),
    "fsdp": (2, {"parallel": {"kind": "fsdp"}}),
    "pipeline": (2, {"parallel": {"kind": "pipeline", "stages": 2}}),
}


def test_parts_that_run_several_times_draw_each_time_and_on_any_strategy(ranks, tmp_path):
    """The masks of dropout at 0.5 agree in half of their numbers, of an encoder's views after a ReLU in more, and noise
    that is drawn between the uses never."""
    digests = set()
    for name, (world, sections) in STRATEGIES.items():
        model = {"kind": "user", "file": str(pathlib.Path(NOISY).with_name("reused.py"))}
        changed = {"run": {"dir": str(tmp_path), "name": name}, "model": model, "observe": {"log_every": 1}, **sections}
        found = ranks(world, run_on_rank, config_in(tmp_path, name, **changed))[0]
        if name == "pipeline":
            assert "it enters network.encoder, network.layer more than once" in found
            continue
        digests.add(found["digest"])
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        agree = {key: np.mean([line[key] for line in steps]) for key in ("mask", "layer", "view", "noise")}
        assert agree["noise"] == 0
        assert agree["mask"] == pytest.approx(0.5, abs=0.05)
        assert agree["layer"] == pytest.approx(0.5, abs=0.05)
        assert 0.5 < agree["view"] < 0.9
    assert len(digests) == 1


# ---- dropout's numbers


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int32]
)
@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_dropout_draws_ones_as_often_as_asked(dtype, p):
    """Also in each of the four places of a draw, and independently of its neighbours."""
    torch.manual_seed(1)
    drawn = torch.empty(400_003, dtype=dtype).bernoulli_(p)
    assert set(drawn.unique().tolist()) <= {0, 1}
    ones = drawn.double()
    spread = 5 * (p * (1 - p)) ** 0.5
    for place in range(4):
        assert abs(ones[place::4].mean() - p) <= spread / 100_000**0.5 + 2**-16
    for distance in (1, 2, 3, 4):
        both = (ones[distance:] * ones[:-distance]).mean()
        assert abs(both - p * p) <= spread / 400_000**0.5 + 2**-15


@pytest.mark.parametrize("p", [1e-5, 3e-6, 1 - 1e-5])
def test_rare_draws_are_not_rounded_away(p):
    torch.manual_seed(2)
    rare = torch.zeros(())
    for _ in range(8):
        drawn = torch.empty(4_000_000, dtype=torch.bool).bernoulli_(p)
        rare += drawn.sum() if p < 0.5 else (~drawn).sum()
    expected = 32_000_000 * min(p, 1 - p)
    assert abs(rare - expected) < 5 * expected**0.5


def test_dropouts_numbers_follow_from_the_seed_and_the_shape():
    def drawn(*shape, seed=3, generator=None):
        torch.manual_seed(seed)
        return torch.empty(*shape).bernoulli_(0.5, generator=generator)

    assert torch.equal(drawn(5, 7), drawn(5, 7)) and not torch.equal(drawn(50), drawn(50, seed=4))
    assert torch.equal(drawn(5, 7).flatten(), drawn(35))
    given = torch.Generator().manual_seed(3)
    assert torch.equal(drawn(35, seed=9, generator=given), drawn(35))
    across = torch.empty(7, 5).t()
    torch.manual_seed(3)
    assert torch.equal(across.bernoulli_(0.5), drawn(5, 7))
    assert drawn(0).shape == (0,) and drawn(()).ndim == 0
    with pytest.raises(RuntimeError, match="expects p to be in"):
        torch.empty(3).bernoulli_(1.5)


def test_every_kind_of_dropout_draws_them_and_has_its_gradient():
    """Modules, functions and PyTorch's attention, in C++; kept values are scaled up."""
    ones = torch.ones(64, 64, requires_grad=True)
    dropped = nn.Dropout(0.25)(ones)
    dropped.sum().backward()
    assert torch.equal(ones.grad, dropped) and torch.equal(dropped.unique(), torch.tensor([0, 1 / 0.75]))
    planes = torch.nn.functional.dropout2d(torch.ones(8, 32, 3, 3), 0.5).sum((2, 3)).unique()
    assert planes.tolist() == [0.0, 18.0]
    value = torch.eye(16)[None]
    mixed = torch.nn.functional.scaled_dot_product_attention(value * 0, value, value, dropout_p=0.5)
    assert set(mixed.unique().tolist()) == {0.0, 0.125}
