"""Models that people bring and that not every strategy can spread: each trains to the same bits, or is refused in words."""

import pytest
from members import further
from training_runs import config_in, run_on_rank

from lockstep.base.contracts import DataSpec
from lockstep.models._user import build
from lockstep.models.user import Config

FILE = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import DataSpec, LossSum


class Points:
    lengths = None
    spec = DataSpec(modality="points", labels=("a", "b", "c"))

    def __init__(self, n):
        r = np.random.default_rng(n)
        self.y, self.ids = r.integers(0, 3, n), r.integers(0, 100, (n, 6))
        self.x = (np.eye(3, 16)[self.y] * 2 + r.normal(size=(n, 16))).astype(np.float32)

    def __len__(self):
        return len(self.y)

    def __getitems__(self, rows):
        return {"x": self.x[list(rows)], "ids": self.ids[list(rows)], "label": self.y[list(rows)]}


def source(options, split):
    return Points(46 if split == "train" else 10)


class WithoutBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, None


class Own(nn.Linear):
    def forward(self, x):
        return WithoutBias.apply(x, self.weight, self.bias)


class Sparse(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids, self.weight, sparse=True)


class Prototypes(nn.Linear):
    def forward(self, h):
        return {"logits": super().forward(h), "extra": self.weight.view(-1)[:5]}


class Network(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.extra, self.embedding = kind, None, None
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))]
        )
        self.head = Prototypes(32, 3) if kind == "view in a block" else nn.Linear(32, 3)
        if kind in ("sparse", "sparse bag", "sparse function"):
            make = {"sparse": nn.Embedding, "sparse bag": nn.EmbeddingBag, "sparse function": Sparse}[kind]
            self.embedding = make(100, 16, **({} if kind == "sparse function" else {"sparse": True}))
        if kind == "no gradient":
            self.layers[1][0] = Own(32, 32)
        if kind == "twice":
            self.layers.append(self.layers[1])
        if kind in ("parameter", "expanded", "empty", "complex", "loss"):
            shape = {"parameter": 1, "expanded": 32, "empty": 0, "complex": 1, "loss": 3}[kind]
            self.extra = nn.Parameter(torch.ones(shape, dtype=torch.complex64 if kind == "complex" else None))
        if kind == "scripted":
            self.layers[1] = torch.jit.script(self.layers[1])
        if kind == "traced":
            self.layers[1][0] = torch.jit.trace(self.layers[1][0], torch.zeros(2, 32))
        if kind == "lazy":
            self.layers[1][0] = nn.LazyLinear(32)
        if kind == "lazy buffer":
            self.layers[1][1] = nn.LazyBatchNorm1d(affine=False)
        if kind == "wrapped":
            self.layers[1] = nn.DataParallel(self.layers[1])
        if kind == "compiled parts":
            self.layers[1] = torch.compile(self.layers[1])
            self.layers[0].compile()
        if kind == "meta":
            self.to("meta")

    def forward(self, batch):
        if self.kind == "forces":
            with torch.enable_grad():
                return self.differentiated(batch["x"])
        if self.kind == "penalty" and self.training:
            return self.differentiated(batch["x"])
        if self.kind == "weights" :
            with torch.enable_grad():
                h = self.features(batch["x"])
                step = torch.autograd.grad(self.head(h).square().mean(), self.head.weight, create_graph=self.training)[0]
            return h @ (self.head.weight - step).t()
        if self.kind == "late module" and self.extra is None:
            self.extra = nn.Linear(16, 16)
        if self.kind == "late weight" and not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(16))
        if self.kind.startswith("late"):
            return self.head(self.features(batch["x"] * getattr(self, "late", 1) + (self.extra or torch.sin)(batch["x"])))
        h = batch["x"] if self.embedding is None else self.embedding(batch["ids"]) + 0
        outputs = self.head(self.features(h if h.ndim == 2 else h.sum(1)))
        if self.kind == "weight of a block":
            return {"logits": outputs, "extra": self.layers[1][0].weight}
        if self.extra is None or self.kind == "loss":
            return outputs
        return {"logits": outputs, "extra": self.extra.expand(4, -1) if self.kind == "expanded" else self.extra}

    def differentiated(self, x):
        x = x.clone().requires_grad_()
        logits = self.head(self.features(x))
        return {"logits": logits, "extra": torch.autograd.grad(logits.sum(), x, create_graph=self.training)[0]}

    def features(self, h):
        for number, layer in enumerate(self.layers):
            if self.kind == "left out" and self.training and number == 1:
                continue
            if self.kind in ("checkpointed", "reentrant") and self.training:
                h = checkpoint(layer, h, use_reentrant=self.kind == "reentrant")
            else:
                h = layer(h)
        return h

    def loss(self, outputs, batch):
        logits, extra = (outputs["logits"], outputs.get("extra")) if isinstance(outputs, dict) else (outputs, None)
        total = F.cross_entropy(logits, batch["label"], reduction="sum")
        if self.kind == "loss":
            total = total + self.extra[batch["label"]].sum()
        return LossSum(total if extra is None else total + extra.square().sum(), len(logits))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)
        self.head = nn.Linear(32, 3)

    def forward(self, batch):
        is_padding = torch.arange(6) >= 1 + batch["ids"][:, :1] % 6
        return self.head(self.encoder(self.embedding(batch["ids"]), src_key_padding_mask=is_padding).mean(1))


def build(options, spec):
    network = Encoder() if options["kind"] == "nested" else Network(options["kind"])
    return torch.compile(network) if options["kind"] == "compiled" else network
"""
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "pipeline": 2}
EQUAL = {
    "sparse": STRATEGIES,
    "sparse bag": ("single", "ddp", "fsdp"),
    "no gradient": STRATEGIES,
    "checkpointed": ("single", "ddp", "fsdp"),
    "twice": ("ddp", "fsdp"),
    "parameter": ("ddp", "fsdp"),
    "expanded": ("ddp", "fsdp"),
    "view in a block": ("ddp", "fsdp"),
    "weight of a block": ("ddp", "fsdp"),
    "forces": ("single", "ddp", "fsdp"),
    "penalty": ("ddp", "fsdp"),
    "weights": ("ddp", "fsdp"),
    "empty": ("single", "ddp"),
    "nested": ("single", "pipeline"),
}
SELDOM = ("sparse bag", "parameter")
"""Whose way through Lockstep that of "sparse" and of "expanded" is, too."""
REFUSED = {
    ("sparse function", "single"): "ModelError: an operation gives a sparse gradient for a weight [100, 16]",
    ("sparse function", "ddp"): "ModelError: an operation gives a sparse gradient for a weight [100, 16]",
    ("sparse function", "fsdp"): "ModelError: an operation gives a sparse gradient for a weight [100, 16]",
    ("reentrant", "fsdp"): "with use_reentrant=False, or have train.recompute=true do that",
    ("empty", "fsdp"): "ModelError: network.extra [0] has no elements to be sharded",
    ("loss", "fsdp"): "ModelError: the loss uses weights of its own",
    ("forces", "pipeline"): "ModelError: forward() differentiates by itself",
    ("penalty", "pipeline"): "ModelError: forward() differentiates by itself",
    ("left out", "pipeline"): "ModelError: a forward pass of training has left out network.layers.1",
    ("complex", "single"): "ModelError: network.extra has complex numbers",
    ("complex", "fsdp"): "ModelError: network.extra has complex numbers",
    ("scripted", "ddp"): "ModelError: network.layers.1 is a torch.jit module",
    ("traced", "fsdp"): "ModelError: network.layers.1.0 is a torch.jit module",
    ("lazy", "fsdp"): "ModelError: network.layers.1.0.weight has no shape yet",
    ("lazy buffer", "single"): "ModelError: network.layers.1.1.running_mean has no shape yet",
    ("late module", "ddp"): "ModelError: network.extra is made in the forward pass",
    ("late weight", "fsdp"): "ModelError: network.late is made in the forward pass",
    ("wrapped", "ddp"): "ModelError: network.layers.1 is wrapped in DataParallel: use its .module",
    ("meta", "fsdp"): "ModelError: network.layers.0.0.weight is on the device meta",
}


@pytest.fixture
def train(ranks, tmp_path):
    """A run -> rank 0's summary or error message."""
    file = tmp_path / "mine.py"
    file.write_text(FILE)

    def run(kind, strategy):
        both = {"kind": "user", "file": str(file), "options": {"kind": kind}}
        config = config_in(
            tmp_path,
            strategy,
            data={**both, "limit": None},
            model=both,
            train={"steps": 4, "global_batch": 16, "micro_batch": 4},
            parallel={"kind": strategy},
            checkpoint={"every_steps": None},
        )
        return ranks(STRATEGIES[strategy], run_on_rank, config)[0]

    return run


@pytest.mark.parametrize("kind", [*(each for each in EQUAL if each not in SELDOM), *further(*SELDOM)])
def test_the_bits_of_every_strategy_that_takes_it(train, kind):
    found = [train(kind, strategy) for strategy in EQUAL[kind]]
    assert all(isinstance(each, dict) for each in found), found
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_what_cannot_be_trained_is_refused_in_words(train, case):
    assert REFUSED[case] in str(train(*case))


def notes_and_names(kind, file):
    model = build(Config(kind="user", file=file, options={"kind": kind}), DataSpec(modality="points"))
    return model._lockstep_notes, [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(("kind", "strategy"), [("compiled parts", "fsdp"), ("compiled", "pipeline")])
def test_what_the_user_compiles_is_trained_as_it_is(train, ranks, tmp_path, kind, strategy):
    assert train(kind, strategy)["digest"] == train("plain", "single")["digest"]
    (((note,), names),) = ranks(1, notes_and_names, kind, tmp_path / "mine.py")
    assert note.startswith("network.layers.1, network.layers.0 of " if "parts" in kind else "network of ")
    assert "train.compile=true compiles the model's blocks" in note
    assert not [name for name in names if "_orig_mod" in name]
