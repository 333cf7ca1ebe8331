"""Models to be exported, one of each kind, and how a test exports them."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.data.collate import collate
from lockstep.inference.export import export_writer
from lockstep.inference.export.export_facts import facts_of
from lockstep.models import _cnn as cnn
from lockstep.models import _transformer as transformer
from lockstep.models import _user as user
from lockstep.recipe.export_config import ExportSection

IMAGES = DataSpec(modality="image", labels=("cat", "dog", "owl"), image_shape=(1, 8, 8))
TEXTS = DataSpec(modality="text", labels=("World", "Sports", "Business", "Sci/Tech"))
WORDS = ("stocks", "fell", "in", "late", "trading", "the", "striker", "scored", "twice", "probes", "reached", "moons")

MY_MODEL = """
from torch import nn


class Mine(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(width, classes)

    def forward(self, batch):
        return self.head(self.body(self.norm(batch["image"].to(self.head.weight.dtype) / 255)))


def build(options, spec):
    return Mine(options["width"], len(spec.labels))
"""


@dataclass(frozen=True)
class Case:
    """A trained model, with what its export has to know."""

    model: object
    section: object
    spec: DataSpec
    beside: object
    batch: object
    """(size, seed, length) -> a batch with labels."""

    def export(self, target, kind="pretrained", **settings):
        """Write it -> facts."""
        facts = facts_of(
            self.section,
            self.spec,
            name="a-run",
            kind="checkpoint",
            step=1234,
            digest="d1" * 32,
            metrics={"loss": 0.25, "accuracy": 0.875},
            torch_version="2.13.0",
            recipe={"data": {"kind": "files"}, "model": self.section.model_dump(mode="json")},
        )
        return export_writer.export(
            self.model,
            target,
            section=ExportSection(kind=kind, **settings),
            facts=facts,
            first=[self.batch(5), self.batch(1, seed=1)],
            every=self.all,
            write_more=self.beside,
        )

    def all(self):
        """A test split, in batches."""
        return [self.batch(size, seed=size, length=4 + size) for size in (31, 17, 8)]

    def logits(self, batch):
        with torch.no_grad():
            return self.model.eval()(batch)


def images(size, seed=0, length=None):
    """Random pixels of random brightness."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (size, 1, 8, 8)) * generator.random((size, 1, 1, 1))
    return {
        "image": torch.from_numpy(pixels.astype(np.uint8)),
        "label": torch.from_numpy(generator.integers(0, 3, size)),
    }


def texts(tokenizer, size, seed=0, length=7):
    """Random words; the longest text has `length` tokens, and no more are in the batch."""
    generator = np.random.default_rng(seed)
    rows = tokenizer([" ".join(generator.choice(WORDS, 40)) for _ in range(size)])
    rows = [row[: int(generator.integers(2, length + 1)) if number else length] for number, row in enumerate(rows)]
    batch = collate({"input_ids": rows, "label": generator.integers(0, 4, size)}, tokenizer.pad_id)
    return {name: column[:, :length] if column.ndim == 2 else column for name, column in batch.items()}


def untrained(make, seed=1):
    """With weights that are large enough to tell samples apart."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embedding" not in name:
                parameter.mul_(2)
    return model


def image_case(seed=1):
    section = cnn.Config(kind="cnn", mean=0.3)
    return Case(untrained(lambda: cnn.build(section, IMAGES), seed), section, IMAGES, lambda _: None, images)


def user_case(folder, code=MY_MODEL, *, seed=1, spec=IMAGES, batch=images, name="my_model.py"):
    """Of a file in `folder`; trained a little, for running statistics that are not the initial ones."""
    file = folder / name
    file.write_text(code)
    trust.own(trust.code_with_imports(file))
    section = user.Config(kind="user", file=file, options={"width": 16})
    model = untrained(lambda: user.build(section, spec), seed).train()
    for number in range(3):
        model(batch(8, seed=number))

    def beside(target):
        trust.copy_with_imports(file, target)

    return Case(model, section, spec, beside, batch)


def text_case(folder, minilm, seed=1):
    """A BERT of one small layer with a real tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    plain = AutoTokenizer.from_pretrained(minilm)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(plain), max_position_embeddings=32, initializer_range=0.5, **shape)
    torch.manual_seed(seed)
    BertForSequenceClassification(config).save_pretrained(folder)
    plain.save_pretrained(folder)
    section = transformer.Config(kind="transformer", name=str(folder), max_length=24)
    model, tokenizer = transformer.build(section, TEXTS), transformer.tokenizer(section)
    return Case(model, section, TEXTS, tokenizer.save, partial(texts, tokenizer))


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())
