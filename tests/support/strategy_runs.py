"""A small model under each strategy, trained in ranks of the test pool."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.base.contracts import DataSpec
from lockstep.base.model_contracts import LossSum, Model
from lockstep.core.distributed.process_group import world_group
from lockstep.core.numerics.digest import digest_of, world_lines
from lockstep.core.numerics.seeds import seed_all
from lockstep.data.in_memory import Images
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.sampler import TrainingRequests
from lockstep.models._transformer import TextModel
from lockstep.recipe import build as assembly
from lockstep.recipe import recipe as recipes
from lockstep.training.step import step

CPU = torch.device("cpu")


class Network(Model):
    """Convolutions with BatchNorm, dropout inside and between the blocks, and odd numbers of rows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Conv2d(5, 7, 3), nn.BatchNorm2d(7), nn.ReLU())
        self.third, self.head = nn.Linear(7 * 16, 31), nn.Linear(31, 10)
        self.gain = nn.Parameter(torch.ones(7, 1, 1))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    def forward(self, batch):
        x = self.second(self.first(batch["image"] / 255)) * self.gain + self.frozen.sum()
        x = F.dropout(x.flatten(1), 0.1, self.training)
        return self.head(torch.relu(self.third(x)))

    def loss(self, outputs, batch):
        total = F.cross_entropy(outputs, batch["label"], reduction="sum")
        return LossSum(total, len(outputs), {"accuracy": (outputs.argmax(1) == batch["label"]).sum()})

    def blocks(self):
        return [self.first, self.second, self.third, self.head]


class Texts:
    """Token ids of 3 to 19 tokens."""

    spec = DataSpec(modality="text", labels=("a", "b", "c"))

    def __init__(self, count):
        generator = np.random.default_rng(1)
        self.lengths = generator.integers(3, 20, count)
        self.rows = [generator.integers(1, 61, length).astype(np.int32) for length in self.lengths]

    def __len__(self):
        return len(self.rows)

    def __getitems__(self, indices):
        return {"input_ids": [self.rows[i] for i in indices], "label": np.array([i % 3 for i in indices])}


def transformer():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40, num_labels=3
    )
    return TextModel(BertForSequenceClassification(config), DataSpec(modality="text", labels=("a", "b", "c")))


def images(count):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Images(pixels, generator.integers(0, 10, count), [str(d) for d in range(10)])


TASKS = {"images": (Network, images), "texts": (transformer, Texts)}


def prepared(task, kind, config, train):
    """State and data of a small task, by its name or given as (model, source): 43 samples in steps of 16, micro-batches of 3; the last step is ragged."""
    build, make = TASKS.get(task) or task
    seed_all(0)
    model, source = build(), make(43)
    order = Order(seed=3, samples=43, global_batch=16, micro_batch=3, lengths=source.lengths)
    sections = {
        "train": {"ema": 0.9, **train},
        "optim": {"lr": 0.01, "clip": 0.5},
        "parallel": {"kind": kind, **config},
    }
    recipe = recipes.Recipe.model_validate(sections)

    def fetched(owned, start, stop):
        requests = TrainingRequests(order=order, owned=owned, start=start, stop=stop)
        return Loader(source, requests, seed=0, pad_id=0, workers=0, device=CPU)

    def sample():
        return next(iter(fetched(lambda _, present: [min(present)], 0, 1))).batch

    return assembly.distribute(recipe, model, sample, total_steps=20, device=CPU), fetched, sample


def trained(task, kind, config, train):
    """Four steps, each with an evaluation after it -> what each gives and leaves behind, on every rank."""
    state, fetched, sample = prepared(task, kind, config, train)
    found = []
    for micro_batches in fetched(state.strategy.owned, 0, 4).steps():
        outcome = step(state, micro_batches, clip=0.5)
        with state.for_use():
            outputs = state.strategy.forward(sample())
        loss = outcome.loss
        sums = {name: float(value) for name, value in loss.sums.items()}
        norm = float(outcome.norm).hex()  # NaN, as fp16 gives it before the scaler has settled, equals itself so
        numbers = float(loss.total), int(loss.count), sums, norm
        found.append((numbers, outputs.tolist(), digest_of(world_lines(state.tensors(), world_group()))))
    return found


SHARDS = 4


class Chain(Model):
    """Linear layers of 8 numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def loss(self, outputs, batch):
        return LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), len(outputs))

    def blocks(self):
        return [*self.layers, self.head]
