"""Documents that are kept apart: what their tokens see, learn and count, in any model and on any cluster."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from causal_models import saved
from running import lockstep, summary
from torch.nn import functional as F

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.checkpoint.weights import restore_model
from lockstep.core.modules.deferred_init import deferred
from lockstep.core.numerics.word_tokens import IGNORED
from lockstep.data.packing import Windows
from lockstep.models import _causal_lm as causal_lm
from lockstep.models import _gpt as gpt
from lockstep.models import _user, user
from lockstep.models.gpt import Config
from lockstep.recipe import build
from lockstep.recipe.recipe import load
from lockstep.recipe.run_paths import run_of
from lockstep.recipe.splits import open_splits

VOCABULARY, CONTEXT = 320, 24
APART = "data.documents=apart"
SHORT = ["train.steps=6", "train.global_batch=10", "train.micro_batch=2", "optim.lr=0.01", "observe.log_every=1"]
SHORT.append("evaluate.sample_tokens=0")
CHAT = "user: useuseuse\nassistant: assassass\0\n"  # with an end token
CLUSTERS = {
    "one": ["launch.processes=1"],
    "two": ["launch.processes=2"],
    "three": ["launch.processes=3"],
    "fsdp": ["launch.processes=2", "parallel.kind=fsdp"],
    "pipeline": ["launch.processes=2", "parallel.kind=pipeline"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of 1 to 90 bytes, chats, and configs of models of both kinds."""
    folder, generator = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    for split, count in (("train", 60), ("test", 9)):
        (folder / split).mkdir()
        for number in range(count):
            text = "".join(generator.choice(list("abc \u00e9"), generator.integers(1, 90)))
            (folder / split / f"{number:03}.txt").write_text(text)
    said = ({"role": role, "content": role[:3] * 3} for role in ("user", "assistant"))
    (folder / "chats.jsonl").write_text((json.dumps({"messages": [*said]}) + "\n") * 40)
    saved(folder / "llama", "llama")
    data = {
        "kind": "text",
        "train": "train",
        "test": "test",
        "tokenizer": "bytes",
        "context": CONTEXT,
        "cache": "cache",
    }
    models = {
        "gpt": {"kind": "gpt", "layers": 2, "width": 16, "heads": 2, "dropout": 0.1},
        "llama": {"kind": "causal_lm", "name": "llama"},
    }
    for name, model in models.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"data": data, "model": model}))
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_tells_where_its_documents_are(seed):
    """Beside one written out token by token; documents may be empty, or longer than a sample."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, (3, 7, 20, 2)[seed], 60)
    of_token = np.repeat(np.arange(60), lengths)
    ids = np.arange(len(of_token), dtype=np.int32)
    ids[::5] = ~ids[::5]  # read only
    starts = np.append(0, lengths.cumsum())[:-1]
    windows = Windows(SimpleNamespace(ids=ids), np.arange(len(ids)), context=6, starts=starts)
    assert windows.spec.documents and windows.spec.context == 6
    found = windows.__getitems__(range(len(windows)))
    for sample in range(len(windows)):
        tokens = range(sample * 6, sample * 6 + 6)
        is_learned = [t + 1 == ids[t + 1] and of_token[t] == of_token[t + 1] for t in tokens]
        assert found["input_ids"][sample].tolist() == [*tokens]
        expected = [t + 1 if learned else IGNORED for t, learned in zip(tokens, is_learned, strict=True)]
        assert found["target"][sample].tolist() == expected
        assert found["bytes"][sample] == sum(each for each in expected if each != IGNORED)
        known = sorted({of_token[t] for t in tokens})
        assert found["document"][sample].tolist() == [known.index(of_token[t]) for t in tokens]


def test_nothing_is_added_where_documents_are_joined(folder, monkeypatch):
    monkeypatch.chdir(folder)
    splits = open_splits(load(folder / "gpt.yaml"))
    assert {*splits.test.__getitems__([0])} == {"input_ids", "target", "bytes"} and not splits.test.spec.documents


@pytest.mark.parametrize("name", ["gpt", "chat"])
def test_a_document_is_a_file_or_a_chat(folder, name, monkeypatch):
    """A file in several pieces is one; the end of a chat is no token of its own."""
    monkeypatch.chdir(folder)
    (folder / "long.txt").write_text("a line of some length\n" * 2000)
    data = ["data.kind=chat", "data.train=chats.jsonl", "data.test=chats.jsonl"] if name == "chat" else []
    data += ["data.test=long.txt"] if name == "gpt" else []
    splits = open_splits(load(folder / "gpt.yaml", [*data, APART]))
    if name == "gpt":
        assert len(splits.test.ids) == 44_001 and splits.test.starts.tolist() == [0]
    else:
        assert splits.test.starts.tolist() == [number * len(CHAT.encode()) for number in range(40)]


def noisy(model):
    """With weights that are not small, in evaluation."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


SPEC = DataSpec(modality="tokens", vocabulary=VOCABULARY, context=CONTEXT, documents=True)


def built(tmp_path, kind, **sizes):
    if kind == "gpt":
        return noisy(gpt.build(Config(kind="gpt", layers=2, width=16, heads=2), SPEC))
    config = causal_lm.Config(kind="causal_lm", name=str(saved(tmp_path / kind, kind, **sizes)))
    return noisy(causal_lm.build(config, SPEC))


def alone(model, tokens, document):
    """Logits of the documents of one sample, each by itself, [T, V]."""
    parts = [tokens[document == number] for number in document.unique()]
    return torch.cat([model({"input_ids": part[None]})[0] for part in parts])


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("gpt", {}),
        ("llama", {}),
        ("gpt2", {}),
        ("mistral", {"sliding_window": 5}),
        ("gemma2", {"sliding_window": 5}),
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16, "pad_token_id": 1}),
    ],
)
def test_a_document_has_the_logits_that_it_has_alone(tmp_path, kind, sizes):
    model = built(tmp_path, kind, **sizes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (3, CONTEXT), generator=generator)
    document = torch.tensor([[0] * 1 + [1] * 9 + [2] * 14, [0] * 12 + [1] * 11 + [2], [0] * CONTEXT])
    with torch.no_grad():
        apart, joined = model({"input_ids": tokens, "document": document}), model({"input_ids": tokens})
        for row in range(3):
            expected = alone(model, tokens[row], document[row])
            close = {"rtol": 1e-3, "atol": 1e-4 * float(expected.abs().max())}
            torch.testing.assert_close(apart[row], expected, **close)
            assert torch.allclose(joined[row], expected, **close) == (row == 2)


@pytest.mark.parametrize("kind", ["rwkv", "bloom"])
def test_a_model_that_cannot_keep_them_apart_is_refused(tmp_path, kind):
    sizes = {"attention_hidden_size": 16, "n_layer": 2, "n_head": 2}
    with pytest.raises(ModelError, match=r"does not keep the documents .* Set data.documents=joined, or take another"):
        built(tmp_path, kind, **sizes)


def test_a_model_that_is_built_without_memory_is_tried_out_with_it(tmp_path):
    """Since weights that are not there tell nothing."""
    config = causal_lm.Config(kind="causal_lm", name=str(saved(tmp_path, "llama")), from_config=True)
    assert deferred(partial(causal_lm.build, config, SPEC)) is None
    assert deferred(partial(gpt.build, Config(kind="gpt"), SPEC)) is not None


OWN = """
from torch import nn
from lockstep.models._documents import visible_of

class Mean(nn.Module):
    def __init__(self, spec, apart):
        super().__init__()
        self.apart, self.embedding = apart, nn.Embedding(spec.vocabulary, spec.context)
        self.head = nn.Linear(spec.context, spec.vocabulary)

    def forward(self, batch):
        tokens = batch["input_ids"]
        document = batch["document"] if self.apart else tokens * 0
        weights = visible_of(document)[:, 0].float()
        return self.head(weights / weights.sum(-1, keepdim=True) @ self.embedding(tokens))

def build(options, spec):
    return Mean(spec, options["apart"])
"""


def test_an_own_model_is_tried_out(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    trust.own(trust.code_with_imports(tmp_path / "own.py"))
    config = user.Config(kind="user", file=tmp_path / "own.py", options={"apart": True})
    assert _user.build(config, SPEC).network.apart
    with pytest.raises(ModelError, match=r"own.py, which gets them as batch\['document'\], does not keep"):
        _user.build(config.model_copy(update={"options": {"apart": False}}), SPEC)


def train(folder, config, name, *settings):
    done = lockstep(folder, "train", f"{config}.yaml", *SHORT, *settings, f"run.name={name}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary(folder, name)
    return found["digest"], found["evaluation"]


@pytest.mark.parametrize(
    "config, clusters",
    [pytest.param("gpt", list(CLUSTERS), marks=pytest.mark.matrix), ("llama", ["one", "fsdp", "pipeline"])],
)
def test_the_same_bits_on_any_cluster_and_the_loss_of_each_document_alone(folder, config, clusters, monkeypatch):
    """The evaluation of every run, and what is computed by hand from the documents of its test split; its export."""
    found = {name: train(folder, config, f"{config}-{name}", APART, *CLUSTERS[name]) for name in clusters}
    assert len({digest for digest, _ in found.values()}) == 1 and all(each == found["one"] for each in found.values())
    monkeypatch.chdir(folder)
    recipe, checkpoint = run_of(folder / "runs" / f"{config}-one")
    test = open_splits(recipe).test
    model = build.build_model(recipe, test.spec)
    restore_model(model, checkpoint)
    nats, count, size = 0.0, 0, 0
    for sample in range(len(test)):
        columns = test.__getitems__([sample])
        tokens, document, target = (torch.from_numpy(columns[n][0]) for n in ("input_ids", "document", "target"))
        with torch.no_grad():
            logits = alone(model.eval(), tokens, document).double()
        nats += float(F.cross_entropy(logits, target, reduction="sum"))
        count += int((target >= 0).sum())
        size += int(((target >= 0) & (target < 256)).sum())
    assert count < 0.99 * len(test) * CONTEXT
    expected = {"loss": nats / count, "perplexity": math.exp(nats / count), "bits_per_byte": nats / math.log(2) / size}
    assert found["one"][1] == pytest.approx(expected, rel=1e-5)
    for kind in ("pretrained", "torch_export")[: len(clusters) - 2]:
        done = lockstep(folder, "export", f"runs/{config}-fsdp", "--to", f"{config}-{kind}", f"export.kind={kind}")
        assert done.returncode == 0, done.stdout + done.stderr
        facts = json.loads((folder / f"{config}-{kind}" / "lockstep.json").read_text())
        assert facts["inputs"] == ["input_ids"] and facts["context"] == CONTEXT  # one document at a time
