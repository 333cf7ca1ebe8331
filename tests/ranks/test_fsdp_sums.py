"""Tensors and weights that several blocks use: fsdp adds up their gradients like one process, or says why it cannot."""

import pytest
import torch
import torch.nn.functional as F
from strategy_runs import Network, Texts, images, trained
from torch import nn

from lockstep.models._transformer import TextModel


class Skips(Network):
    """What the first block gives is used three times more, and changed in place."""

    def __init__(self):
        super().__init__()
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(5, 5, 3, padding=1), nn.Flatten(1))
        self.third, self.head = nn.Linear(180, 180), nn.Linear(180, 10)
        self.gain = nn.Parameter(torch.ones(1, 1))

    def forward(self, batch):
        x = self.first(batch["image"] / 255) * 1.1
        y = self.second(x.clone())
        y += x.flatten(1)
        z = self.third(y) * torch.sigmoid(y) + x.flatten(1) * y
        return self.head(z * self.gain + y) + self.head.bias * x.mean()


class TiedByUse(Network):
    """The last layer is the weight of the first one of another block."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(31, 7 * 16)

    def forward(self, batch):
        x = self.second(self.first(batch["image"] / 255)).flatten(1)
        x = self.head(torch.relu(self.third(x)))
        return F.linear(x, self.third.weight)[:, :10]


class Again(Network):
    """A block that runs twice, and one that does not run at all."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def forward(self, batch):
        return super().forward(batch) + super().forward(batch)

    def blocks(self):
        return [*super().blocks(), self.unused]


def deberta():
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    return TextModel(
        DebertaV2ForSequenceClassification(
            DebertaV2Config(
                vocab_size=61,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=40,
                num_labels=3,
                relative_attention=True,
                pos_att_type=["p2c", "c2p"],
                max_position_embeddings=32,
            )
        ),
        Texts.spec,
    )


def t5():
    from transformers import T5Config, T5ForSequenceClassification

    return TextModel(
        T5ForSequenceClassification(
            T5Config(
                vocab_size=61,
                d_model=24,
                d_kv=8,
                d_ff=40,
                num_layers=2,
                num_heads=3,
                num_labels=3,
                eos_token_id=1,
                decoder_start_token_id=0,
            )
        ),
        Texts.spec,
    )


class TextsWithEnd(Texts):
    def __getitems__(self, indices):
        columns = super().__getitems__(indices)
        for row in columns["input_ids"]:
            row[row == 1] = 2
            row[-1] = 1
        return columns


@pytest.mark.parametrize(
    "task",
    [
        (Skips, images),
        (TiedByUse, images),
        (Again, images),
        *(pytest.param(task, marks=pytest.mark.matrix) for task in [(deberta, Texts), (t5, TextsWithEnd)]),
    ],
    ids=["skips", "tied", "again", "deberta", "t5"],
)
def test_fsdp_gives_the_bits_of_one_process(ranks, task):
    (expected,) = ranks(1, trained, task, "single", {}, {})
    for world, config in ((1, {}), (2, {}), (3, {"reshard": False})):
        for rank, found in enumerate(ranks(world, trained, task, "fsdp", config, {})):
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert one == other, (world, config, rank, number)
