"""A user's file with sound models of many kinds, by options.net."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

PIXELS = 64


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x):
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


class Images(nn.Module):
    """A ResNet with dropout and spectral norm."""

    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.stages = nn.ModuleList([Residual(8), Residual(8)])
        self.drop = nn.Dropout2d(0.1)
        self.head = spectral_norm(nn.Linear(8, classes))

    def forward(self, batch):
        x = self.stem(batch["image"].float().div_(255))
        for stage in self.stages:
            x = stage(x)
        return self.head(self.drop(x).mean((2, 3)))


class Recurrent(nn.Module):
    """Rows of an image as a sequence."""

    def __init__(self, classes):
        super().__init__()
        self.rnn = nn.LSTM(8, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, batch):
        outputs, _ = self.rnn(batch["image"].flatten(1).view(-1, 8, 8) / 255)
        return self.head(outputs[:, -1])


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.weights = None

    def forward(self, x):
        given, self.weights = self.attention(x, x, x)  # kept for a look at it
        return self.norm(x + given)


class Tied(nn.Module):
    """Reads pixels as tokens; its embedding is its head."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes
        self.embedding = nn.Embedding(17, 16)
        self.layers = nn.ModuleList([Layer(16), Layer(16)])
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.cache = {}

    def forward(self, batch):
        tokens = (batch["image"].flatten(1)[:, :24].float() / 16).long().clamp(0, 16)
        x = self.embedding(tokens)
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.linspace(0, 1, x.shape[1])[:, None]
        x = x + self.cache[x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))[:, : self.classes]


class Gpt(nn.Module):
    """A tiny GPT-2, with its dropout."""

    def __init__(self, classes):
        super().__init__()
        from transformers import GPT2Config, GPT2ForSequenceClassification

        sizes = {"vocab_size": 17, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        config = GPT2Config(**sizes, num_labels=classes, pad_token_id=0, bos_token_id=0, eos_token_id=0)
        self.gpt = GPT2ForSequenceClassification(config)

    def forward(self, batch):
        tokens = (batch["image"].flatten(1)[:, :24].float() / 16).long().clamp(1, 16)
        return self.gpt(input_ids=tokens, use_cache=False).logits


def build(options, spec):
    assert math.prod(spec.image_shape) == PIXELS
    kinds = {"images": Images, "recurrent": Recurrent, "tied": Tied, "gpt": Gpt}
    return kinds[options["net"]](len(spec.labels))
