"""A real pretrained encoder through the whole path, and the real data sets where they are at hand."""

import csv
import json

import numpy as np
import pytest
import torch
import warm
from class_texts import LABELS, TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import load
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.models import _transformer as transformer


def lockstep(folder, *arguments, code=0):
    done = warm.run(["lockstep", *arguments], cwd=folder, timeout=170)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def news(tmp_path_factory):
    """A small AG News: a few words decide the class."""
    folder = tmp_path_factory.mktemp("news")
    words = {1: "president minister war", 2: "goal match striker", 3: "stocks profit bank", 4: "software space chip"}
    for split, count in (("train", 96), ("test", 30)):
        generator = np.random.default_rng(count)
        rows = []
        for i in range(count):
            label = i % 4 + 1
            text = " ".join(generator.choice(words[label].split(), size=int(generator.integers(2, 30))))
            rows.append(f'"{label}","{text[:5]}","{text}"')
        (folder / f"{split}.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_the_whole_path_in_the_models_own_format(news, minilm, tmp_path):
    """Two processes, bf16: train, export; plain transformers loads it and predicts the same."""
    (tmp_path / "c.yaml").write_text(
        "data: {kind: ag_news}\nmodel: {kind: transformer, max_length: 32}\n"
        "train: {epochs: 2, global_batch: 16, micro_batch: 4, precision: bf16}\noptim: {lr: 3e-4}\n"
    )
    settings = [f"data.root={news}", f"data.cache={tmp_path}/cache", f"model.name={minilm}", "run.name=a"]
    assert "tokenising" in lockstep(tmp_path, "data", "c.yaml", *settings)
    output = lockstep(tmp_path, "train", "c.yaml", *settings, "launch.processes=2")
    assert "tokenising" not in output
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["evaluation"]["accuracy"] > 0.8
    refusal = lockstep(tmp_path, "train", "c.yaml", *settings, "data.group_by_length=1", code=2)
    assert "data.group_by_length: 50 in the checkpoint, 1 now" in refusal
    lockstep(tmp_path, "export", "runs/a")

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    export = tmp_path / "runs" / "a" / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    assert model.config.id2label == dict(enumerate(LABELS))
    with torch.no_grad():
        found = model(**tokenizer(TEXTS[:2], return_tensors="pt", padding=True)).logits.argmax(1).tolist()
    assert [model.config.id2label[i] for i in found] == ["Business", "Sports"]
    long = " ".join([*["goal match striker"] * 20, *["stocks profit bank"] * 400])
    assert len(tokenizer(long, truncation=True).input_ids) == 32  # as in training: the end is not read
    with torch.no_grad():
        whole = model(**tokenizer(long, truncation=True, return_tensors="pt")).logits.softmax(1)[0]
    mine = load(export).predict(long)
    assert mine.label == model.config.id2label[int(whole.argmax())] == "Sports"
    assert mine.confidence == pytest.approx(float(whole.max()), abs=1e-4)


def built(name, labels=LABELS):
    config = transformer.Config(kind="transformer", name=str(name), max_length=16)
    return transformer.build(config, DataSpec(modality="text", labels=labels))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_length": 256}, "eager"),
        ({"max_length": 257}, "sdpa"),
        ({"attention": "sdpa"}, "sdpa"),
        ({"attention": "eager", "max_length": 512}, "eager"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="auto chooses for a CPU here")
def test_attention_is_chosen_for_the_cpu_or_as_asked(minilm, settings, expected):
    """An export does not keep it: whoever loads it chooses anew."""
    spec = DataSpec(modality="text", labels=LABELS)
    network = transformer.build(transformer.Config(kind="transformer", name=str(minilm), **settings), spec).network
    assert network.config._attn_implementation == expected
    assert "attn" not in network.config.to_json_string(use_diff=False)


def test_blocks_cover_every_parameter_once(minilm):
    model = built(minilm)
    blocks = model.blocks()
    held = [id(p) for block in blocks for p in block.parameters()]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in model.parameters()}
    assert sum("Layer" in type(block).__name__ for block in blocks) >= 6


@pytest.fixture(scope="module")
def reads_16(minilm):
    return transformer.tokenizer(transformer.Config(kind="transformer", name=str(minilm), max_length=16))


@given(st.text("ab \n.,9\u0301\u5317\u00df-", min_size=1, max_size=60), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_the_start_of_a_long_text_gives_the_tokens_of_the_whole(reads_16, part, times):
    text = part * times
    expected = reads_16.tokenizer(text, truncation=True, max_length=16)["input_ids"]
    assert [each.tolist() for each in reads_16(["a", text])] == [reads_16(["a"])[0].tolist(), expected]


@pytest.mark.parametrize(
    ("name", "message"), [("no-such-model-anywhere", "it is no folder here"), ("tests", "the folder needs whole files")]
)
def test_a_name_that_cannot_be_loaded_says_how_to_mend_it(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    with pytest.raises(ModelError, match=message):
        built(name)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_real_mnist_learns(shared_data, tmp_path):
    """A tenth of real MNIST, one epoch, two processes: 0.935 to 0.954 in twelve runs (six seeds, two orders each)."""
    (tmp_path / "c.yaml").write_text(
        f"data: {{kind: mnist, root: {shared_data}, limit: 6000}}\noptim: {{lr: 2e-3}}\n"
        "train: {epochs: 1, global_batch: 64, micro_batch: 32, precision: bf16}\nrun: {name: a}\n"
    )
    lockstep(tmp_path, "train", "c.yaml", "launch.processes=2")
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["evaluation"]["accuracy"] > 0.92
    assert summary["samples_seen"] == 6000


@pytest.mark.timeout(400)
def test_real_news_learns(shared_data, minilm, tmp_path):
    """A few hundred real documents through the real encoder beat chance by far."""
    for split, count in (("train", 448), ("test", 200)):
        with (shared_data / "ag_news" / f"{split}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        with (tmp_path / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows[:: len(rows) // count])
    (tmp_path / "c.yaml").write_text(
        f"data: {{kind: ag_news, root: {tmp_path}, cache: {tmp_path}/cache}}\n"
        f"model: {{kind: transformer, name: {minilm}, max_length: 32}}\noptim: {{lr: 3e-4}}\nrun: {{name: a}}\n"
        "train: {epochs: 1, global_batch: 32, micro_batch: 16}\nevaluate: {every_epochs: null, micro_batch: 64}\n"
    )
    lockstep(tmp_path, "train", "c.yaml", "launch.processes=2")
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["evaluation"]["accuracy"] > 0.7


@pytest.mark.parametrize("kind", ["bert", "gpt2", "deberta-v2"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, kind):
    """transformers makes one up, which knows special tokens alone: every text would be the same."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds no tokenizer: .* tokenizer\.save_pretrained\(FOLDER\)"):
        transformer.tokenizer(transformer.Config(kind="transformer", name=str(tmp_path)))


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_more_layers_than_anybody_builds_are_refused_at_once(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "text_config": {key: 10**8}}))
    with pytest.raises(ModelError, match=rf"config.json asks for 100,000,000 layers \({key}\), more than 10,000"):
        transformer.tokenizer(transformer.Config(kind="transformer", name=str(tmp_path)))
