"""Rows of the matrix of recipes."""

import json
from typing import NamedTuple

import numpy as np
import torch
from places import OWN

GLOBAL_BATCH, EPOCHS, CLIP, FIRST_SCALE = 40, 3, 0.1, 2.0**16
CONTEXT = 8
"""Tokens of a sample of the language model, each of which counts."""


class Row(NamedTuple):
    """One recipe of the matrix."""

    model: str
    precision: str
    micro_batch: int
    """4: ten shards, several to a process unless there are more; 20: two, so that most of eight processes idle."""
    clip: float | None
    workers: int
    samples: int
    """80: two whole steps an epoch; 62: the second one has 22 samples, in shards that are whole, short and empty."""

    @property
    def name(self):
        words = [self.model, self.precision, f"m{self.micro_batch}", "clip" if self.clip else "free"]
        return "-".join([*words, f"workers{self.workers}", "ragged" if self.samples % GLOBAL_BATCH else "whole"])


def make_small_transformer(folder):
    """A DistilBERT of two layers with dropout and random weights, its tokenizer, and texts to classify or continue."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

    generator = np.random.default_rng(0)
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    sizes = {"vocab_size": len(words), "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    dropout = {"dropout": 0.2, "attention_dropout": 0.2, "seq_classif_dropout": 0.2}
    torch.manual_seed(0)
    DistilBertForSequenceClassification(
        DistilBertConfig(**sizes, **dropout, max_position_embeddings=32, pad_token_id=0)
    ).save_pretrained(folder)
    for split, count in (("train", 80), ("test", 8)):
        texts = [" ".join(generator.choice(words[2:], generator.integers(1, 30))) for _ in range(count)]
        lines = [json.dumps({"text": text, "label": number % 4}) for number, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
        (folder / f"{split}.txt").write_text(" ".join(texts))
    return folder


def config_of(row, small_transformer, seed=0):
    data, model = {"kind": "digits"}, {"kind": "user", "file": str(OWN / f"{row.model}.py")}
    if row.model == "transformer":
        data = {"kind": "files", "train": str(small_transformer / "train.jsonl")}
        data |= {"test": str(small_transformer / "test.jsonl"), "cache": str(small_transformer / "cache")}
        model = {"kind": "transformer", "name": str(small_transformer), "max_length": 32}
    if row.model == "gpt":
        data = {"kind": "text", "context": CONTEXT, "cache": str(small_transformer / "cache")}
        data |= {split: str(small_transformer / f"{split}.txt") for split in ("train", "test")}
        model = {"kind": "gpt", "layers": 2, "width": 16, "heads": 2, "dropout": 0.2}
    if row.model == "noisy":
        data["augment"] = model["file"]
    return {
        "run": {"seed": seed},
        "data": {**data, "limit": row.samples, "workers": row.workers},
        "model": model,
        "train": {
            "epochs": EPOCHS,
            "global_batch": GLOBAL_BATCH,
            "micro_batch": row.micro_batch,
            "precision": row.precision,
        },
        "optim": {"clip": row.clip},
    }
