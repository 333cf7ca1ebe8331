"""What every contender of compare.py trains: the same data, models and settings, without Lockstep.

G = samples of a step, over all processes.
"""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_LENGTH = 128
"""Tokens of a document."""
DISTILBERT: dict[str, dict[str, int]] = {
    "distilbert": {},
    "distilbert-tiny": {"n_layers": 1, "dim": 32, "n_heads": 2, "hidden_dim": 64},
}
"""An encoder of its size with random weights, and one for trials."""


@dataclass(frozen=True)
class Work:
    """One model on one data set."""

    name: str
    model: str
    """cnn, minilm, one of DISTILBERT, or one of gpt.SIZES."""
    global_batch: int
    steps: int
    """Steps of a run; its samples are all different."""
    learning_rate: float
    small_micro_batch: int | None = None
    """A smaller micro-batch than global_batch / processes, where one was faster."""

    @property
    def samples(self) -> int:
        return self.global_batch * self.steps

    @property
    def is_text(self) -> bool:
        return self.model in ("minilm", *DISTILBERT)


WORKS = {
    work.name: work
    for work in (
        Work("mnist-64", "cnn", 64, 256, 1e-3),
        Work("mnist-512", "cnn", 512, 32, 2e-3),
        Work("minilm-32", "minilm", 32, 32, 5e-5),
        Work("minilm-128", "minilm", 128, 12, 1e-4, small_micro_batch=16),
        Work("distilbert-32", "distilbert", 32, 12, 1e-4),
        Work("gpt-16", "gpt", 16, 12, 3e-4),
        Work("gpu-encoder", "distilbert", 128, 60, 1e-4),  # of gpu.py
        Work("gpu-gpt", "gpt-100m", 16, 50, 3e-4),
        Work("gpu-cnn", "cnn", 512, 110, 2e-3),
        Work("tiny-encoder", "distilbert-tiny", 4, 16, 1e-4),
        Work("tiny-gpt", "gpt-tiny", 4, 16, 3e-4),
        Work("tiny-cnn", "cnn", 8, 16, 2e-3),
    )
}


class CNN(nn.Module):
    """Images float [m, 1, 28, 28] -> logits [m, 10]: the network of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def read_images(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """MNIST's files -> images uint8 [N, 1, 28, 28], labels int64 [N]."""
    images = gzip.decompress((folder / "mnist" / f"{split}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "mnist" / f"{split}-labels-idx1-ubyte.gz").read_bytes())
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28)
    return pixels, np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)


def normalized(images: Tensor) -> Tensor:
    """uint8 -> float of mean 0 and standard deviation 1."""
    return (images.float() / 255 - 0.1307) / 0.3081


def read_texts(folder: Path, samples: int) -> tuple[list[str], list[int]]:
    """The first documents of AG News, and their labels."""
    texts, labels = [], []
    with (folder / "ag_news" / "train.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            if len(texts) == samples:
                break
            texts.append(f"{row[1]} {row[2]}")
            labels.append(int(row[0]) - 1)
    return texts, labels


def tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder."""
    from transformers import AutoTokenizer  # noqa: PLC0415 (only texts need it)

    return AutoTokenizer.from_pretrained(folder)


def text_model(kind: str, folder: Path) -> nn.Module:
    """MiniLM with its pretrained weights, or an encoder of DistilBERT's size with random ones; both with dropout."""
    from transformers import (  # noqa: PLC0415
        AutoModelForSequenceClassification,
        DistilBertConfig,
        DistilBertForSequenceClassification,
    )

    if kind == "minilm":
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=4).train()  # it is in eval mode
    return DistilBertForSequenceClassification(DistilBertConfig(num_labels=4, **DISTILBERT[kind]))


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or each of a dict, on the device: without a wait if it is a GPU."""
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    return value if device.type == "cpu" else value.pin_memory().to(device, non_blocking=True)


def padded(rows: list[list[int]], labels: list[int], length: int | None = None) -> dict[str, Tensor]:
    """Token ids of different lengths -> a batch [m, T] with a mask; T is the longest, rounded up to 8, or `length`."""
    width = length or -(-max(map(len, rows)) // 8) * 8
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}
