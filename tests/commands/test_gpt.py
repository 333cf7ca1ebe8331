"""The decoder against one written out by hand, and language models trained, killed, resumed and measured."""

import json
import math
import time

import numpy as np
import pytest
import torch
from members import further
from running import lockstep, started, summary, workers
from torch.nn import functional as F

from lockstep.base.contracts import DataSpec
from lockstep.checkpoint.weights import restore_model
from lockstep.core.numerics.seeds import seed_all
from lockstep.models import _gpt as gpt
from lockstep.models.gpt import Config
from lockstep.models.objectives._choice import with_objective
from lockstep.recipe import build
from lockstep.recipe.build import token_flops
from lockstep.recipe.run_paths import run_of
from lockstep.recipe.splits import open_splits

VOCABULARY, WIDTH, HEADS, LAYERS = 61, 24, 3, 2


def decoder(**settings):
    """With random weights that are not small, in evaluation."""
    sizes = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, **settings}
    seed_all(0)
    model = gpt.build(Config(kind="gpt", **sizes), DataSpec(modality="tokens", vocabulary=VOCABULARY))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def tokens(samples=2, length=13):
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x):
    """Rotary positions as complex numbers: pair i of position p is turned by p / 10000^(i / pairs)."""
    pairs = x.shape[-1] // 2
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(pairs) / pairs)
    z = torch.complex(x[:, :pairs], x[:, pairs:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


def by_hand(weights, ids, tied=False):
    """Logits [T, V] of one sample, in loops over layers and heads."""
    w, size = {name: tensor.double() for name, tensor in weights.items()}, WIDTH // HEADS
    x = w["embedding.weight"][ids]
    for layer in range(LAYERS):
        name = f"layers.{layer}."
        normal = normed(x, w[f"{name}norm_1.weight"])
        heads = []
        for head in range(HEADS):
            rows = slice(head * size, (head + 1) * size)
            query, key, value = (normal @ w[f"{name}attention.{n}.weight"][rows].T for n in ("query", "key", "value"))
            scores = turned(query) @ turned(key).T / size**0.5
            later = torch.ones_like(scores).triu(1).bool()
            heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value)
        x = x + torch.cat(heads, -1) @ w[f"{name}attention.output.weight"].T
        normal = normed(x, w[f"{name}norm_2.weight"])
        gate, up = (normal @ w[f"{name}feed_forward.{n}.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[f"{name}feed_forward.down.weight"].T
    return normed(x, w["head.norm.weight"]) @ w["embedding.weight" if tied else "head.linear.weight"].T


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_a_decoder_written_out(tied):
    model, ids = decoder(tied=tied), tokens()
    with torch.no_grad():
        found = model({"input_ids": ids})
    assert found.shape == (2, 13, VOCABULARY)
    for sample in range(2):
        torch.testing.assert_close(found[sample].double(), by_hand(model.state_dict(), ids[sample], tied), **CLOSE)


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def test_no_token_is_seen_before_its_turn():
    model, ids = decoder(), tokens(1)
    with torch.no_grad():
        before = model({"input_ids": ids})
        for place in range(13):
            other = ids.clone()
            other[0, place] = (other[0, place] + 1) % VOCABULARY
            after = model({"input_ids": other})
            assert torch.equal(after[:, :place], before[:, :place])
            assert (after[:, place:] != before[:, place:]).any(-1).all()


def test_a_shorter_sample_has_the_same_logits():
    model, ids = decoder(), tokens()
    with torch.no_grad():
        whole = model({"input_ids": ids})
        for length in (1, 2, 7):
            torch.testing.assert_close(model({"input_ids": ids[:, :length]}), whole[:, :length], **CLOSE)


def test_only_distances_between_positions_count():
    query, key = (torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(n)) for n in range(2))

    def scores(first):
        turns = gpt.turns_at(torch.arange(first, first + 5), 8)
        return gpt.rotated(query, turns) @ gpt.rotated(key, turns).transpose(2, 3)

    torch.testing.assert_close(scores(0), scores(1000), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(scores(0), query @ key.transpose(2, 3), atol=0.1)
    assert torch.equal(gpt.rotated(query, gpt.turns_at(torch.zeros(5), 8)), query)


@pytest.mark.parametrize("hidden", [None, 40])
def test_parameters_are_counted(hidden):
    inside = hidden or 64  # 8/3 of 24, in steps of 32
    block = 4 * WIDTH**2 + 3 * WIDTH * inside + 2 * WIDTH
    counts = [sum(p.numel() for p in decoder(hidden=hidden, tied=tied).parameters()) for tied in (False, True)]
    expected = LAYERS * block + WIDTH + 2 * VOCABULARY * WIDTH
    assert counts == [expected, expected - VOCABULARY * WIDTH]


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_that_of_a_guess(tied):
    """Since the first logits are near zero."""
    seed_all(0)
    spec = with_objective(DataSpec(modality="tokens", vocabulary=VOCABULARY), "causal_lm")
    model = gpt.build(Config(kind="gpt", layers=6, width=64, tied=tied), spec)
    ids = tokens(8, 40)
    batch = {"input_ids": ids[:, :-1], "target": ids[:, 1:], "bytes": torch.full((8,), 39)}
    with torch.no_grad():
        loss = model.loss(model(batch), batch)
    assert float(loss.total) / int(loss.count) == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert int(loss.count) == 8 * 39


def test_dropout_is_for_training_only():
    model, ids = decoder(dropout=0.5), tokens()
    with torch.no_grad():
        assert torch.equal(model({"input_ids": ids}), model({"input_ids": ids}))
        model.train()
        assert not torch.equal(model({"input_ids": ids}), model({"input_ids": ids}))


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "wörter", "文字"]
STEPS, EVERY = 40, 10
BRIEF = ["train.steps=15", "evaluate.sample_tokens=0"]
"""For runs that are compared with others only."""
SIZES = {"layers": 2, "width": 32, "heads": 4, "dropout": 0.1}
VARIANTS = {
    "two": ["launch.processes=2"],
    "three": ["launch.processes=3"],
    "fsdp": ["launch.processes=2", "parallel.kind=fsdp"],
    "pipeline": ["launch.processes=2", "parallel.kind=pipeline"],
    "recomputed": ["launch.processes=2", "train.recompute=true"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three documents in which each word follows from the one before it."""
    folder, generator = tmp_path_factory.mktemp("gpt"), np.random.default_rng(0)
    (folder / "texts").mkdir()
    for name in "abc":
        starts = generator.integers(0, len(WORDS), 300)
        lines = [" ".join(WORDS[(start + n) % len(WORDS)] for n in range(6)) for start in starts]
        (folder / "texts" / f"{name}.txt").write_text("\n".join(lines))
    config = {
        "data": {"kind": "text", "train": "texts", "context": 24, "cache": "cache"},
        "model": {"kind": "gpt", **SIZES},
        "train": {"steps": STEPS, "global_batch": 18, "micro_batch": 4},
        "optim": {"lr": 0.01},
        "checkpoint": {"every_steps": EVERY},
        "observe": {"log_every": 1},
        "launch": {"processes": 1},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    return folder


def train(folder, name, *settings):
    done = lockstep(folder, "train", "c.yaml", f"run.name={name}", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder, name)


@pytest.fixture(scope="module")
def alone(folder):
    return train(folder, "one")


@pytest.fixture(scope="module")
def brief(folder):
    """Of one process, too."""
    return train(folder, "brief", *BRIEF)


def test_it_learns(folder, alone):
    measured = alone["evaluation"]
    last = json.loads((folder / "runs" / "one" / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["mfu"] > 0 and last["tokens_per_second"] == pytest.approx(last["samples_per_second"] * 24)
    assert set(measured) == {"loss", "perplexity", "bits_per_byte"}
    assert measured["perplexity"] < 20  # of 257 tokens


def bits(found):
    return found["digest"], found["evaluation"]


@pytest.mark.parametrize(
    "variant",
    ["pipeline", *further("fsdp", "two", "three", "recomputed")],
)
def test_the_same_bits_and_metrics_on_any_cluster(folder, brief, variant):
    assert bits(train(folder, variant, *BRIEF, *VARIANTS[variant])) == bits(brief)


def test_tied_weights_are_spread_alike(folder, brief):
    tied = ["model.tied=true", *BRIEF]
    expected = train(folder, "tied-one", *tied)
    assert bits(train(folder, "tied-fsdp", *tied, *VARIANTS["fsdp"])) == bits(expected) != bits(brief)


@pytest.mark.matrix
def test_tensor_parallelism_comes_close(folder, alone):
    found = train(folder, "tensor", "launch.processes=2", "parallel.kind=tensor", "model.dropout=0")
    expected = train(folder, "without-dropout", "model.dropout=0")
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-3)


@pytest.mark.matrix
def test_killed_and_resumed_on_another_number_of_processes(folder, alone):
    command = ["train", "c.yaml", "run.name=killed", "launch.max_restarts=0"]
    process = started(folder, *command, "launch.processes=2")
    checkpoint, end = folder / "runs" / "killed" / "checkpoints" / f"step-{EVERY:09}", time.monotonic() + 60
    while not (checkpoint / "manifest.json").exists():
        assert time.monotonic() < end, f"{checkpoint} was never written"
        time.sleep(0.01)
    workers(process)[1].kill()
    process.communicate(timeout=60)
    again = lockstep(folder, *command, "launch.processes=3")
    assert again.returncode == 0 and "resumed after step" in again.stdout, again.stdout + again.stderr
    assert bits(summary(folder, "killed")) == bits(alone)


def opened(folder, name, monkeypatch):
    """The test split of a run, its tokenizer, and the model of its last checkpoint."""
    monkeypatch.chdir(folder)
    recipe, checkpoint = run_of(folder / "runs" / name)
    data = open_splits(recipe)
    model = build.build_model(recipe, data.train.spec)
    restore_model(model, checkpoint)
    return data.test, data.tokenizer, model.eval()


@pytest.mark.matrix
def test_prove_finds_nothing(folder):
    """The gradient of a step in float64 is that of its samples at once; runs differ in nothing but their speed."""
    done = lockstep(folder, "prove", "c.yaml", "--only", "repeat", "--only", "worlds")
    assert done.returncode == 0 and "none differs" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("tied", [False, True])
def test_operations_per_token_are_those_of_the_layers(tied):
    """Four projections, three feed-forward layers and the head; scores and their sums of values over all T tokens."""
    layers, width, hidden, context = 3, 32, 96, 24
    config = Config(kind="gpt", layers=layers, width=width, heads=4, hidden=hidden, tied=tied)
    model = gpt.build(config, DataSpec(modality="tokens", vocabulary=VOCABULARY))
    forward = layers * (4 * width**2 + 3 * width * hidden + 2 * context * width) + width * VOCABULARY
    assert token_flops(model, context) == 3 * 2 * forward


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_metrics_are_those_computed_by_hand(folder, alone, tokenizer, monkeypatch):
    """From the logits of every sample of the test split, and the bytes of its text."""
    name, measured = "one", alone["evaluation"]
    if tokenizer == "bpe":
        settings = ["data.tokenizer=bpe", "data.vocabulary=320", *BRIEF]
        measured, name = train(folder, "bpe", *settings, "launch.processes=2")["evaluation"], "bpe"
        assert bits(train(folder, "bpe-one", *settings)) == bits(summary(folder, "bpe"))
    windows, text_tokenizer, model = opened(folder, name, monkeypatch)
    nats, count, body = 0.0, 0, []
    for sample in range(len(windows)):
        ids = torch.from_numpy(np.array(windows.ids[24 * sample : 24 * sample + 25])).long()
        with torch.no_grad():
            chances = F.log_softmax(model({"input_ids": ids[None, :-1]})[0].double(), -1)
        nats -= float(sum(chances[place, ids[place + 1]] for place in range(24)))
        count += 24
        body += [token for token in ids[1:].tolist() if token != text_tokenizer.pad_id]
    size = len(text_tokenizer.decode([*windows.ids[:1].tolist(), *body]).encode())
    size -= len(text_tokenizer.decode(windows.ids[:1].tolist()).encode())
    assert 0 <= len(windows.ids) - 1 - count < 24
    expected = {
        "loss": nats / count,
        "perplexity": math.exp(nats / count),
        "bits_per_byte": nats / math.log(2) / size,
    }
    assert measured == pytest.approx(expected, rel=1e-5)
    assert (size > 1.5 * count) == (tokenizer == "bpe")


def test_the_worst_samples_are_those_of_the_highest_loss(folder, alone, monkeypatch):
    """Each with the token that surprises most, and what was expected."""
    done = lockstep(folder, "evaluate", "runs/one", "--worst", "3", "--to", "evaluated")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads((folder / "evaluated" / "evaluation.json").read_text())["worst"]
    windows, tokenizer, model = opened(folder, "one", monkeypatch)
    found = []
    for sample in range(len(windows)):
        columns = {name: torch.from_numpy(column) for name, column in windows.__getitems__([sample]).items()}
        with torch.no_grad():
            chances = F.log_softmax(model(columns)[0].double(), -1)
        losses = -chances[range(24), columns["target"][0]]
        place = int(losses.argmax())
        token, likeliest = int(columns["target"][0, place]), int(chances[place].argmax())
        found.append((float(losses.mean()), sample, *(repr(tokenizer.decode([each])) for each in (token, likeliest))))
    expected = sorted(found, reverse=True)[:3]
    assert [each["loss"] for each in shown] == pytest.approx([loss for loss, *_ in expected], rel=1e-5)
    assert [(each["index"], each["label"], each["predicted"]) for each in shown] == [
        tuple(rest) for _, *rest in expected
    ]
    text = tokenizer.decode(windows.__getitems__([shown[0]["index"]])["input_ids"][0].tolist())
    assert shown[0]["text"] == text
    assert (folder / "evaluated" / "evaluation.html").read_text().count("<li>") == 3


def test_the_export_is_the_same_model(folder, alone, monkeypatch):
    done = lockstep(folder, "export", "runs/one", "--to", "export")
    assert done.returncode == 0 and "the same weights bit for bit" in done.stdout, done.stdout + done.stderr
    from lockstep.inference.export.export_reader import forward_of

    windows, _, model = opened(folder, "one", monkeypatch)
    batch = {"input_ids": torch.from_numpy(windows.__getitems__(range(3))["input_ids"])}
    with torch.no_grad():
        torch.testing.assert_close(forward_of(folder / "export")(batch), model(batch))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.width=30"], "width=30 cannot be cut into heads=4 parts of an even size"),
        (["model.width=36"], "width=36 cannot be cut into heads=4 parts of an even size"),
        (["model.tied=true", *VARIANTS["pipeline"]], "embedding.weight is used in blocks 0 and 3 alike (tied weights)"),
        (["model.heads=1", "launch.processes=2", "parallel.kind=tensor"], "attention heads"),
        (["data.context=1000000"], "tokens of text, too few for a sample of data.context=1000000"),
        (["data.kind=digits"], "gpt takes texts cut into tokens, but data.kind=digits gives images"),
        (["checkpoint.best=accuracy"], "accuracy"),
    ],
    ids=["width", "odd", "tied", "tensor", "context", "digits", "best"],
)
def test_what_does_not_fit_is_said_in_one_message(folder, settings, message):
    if "data.kind=digits" in settings:
        other = json.loads((folder / "c.yaml").read_text()) | {"data": {"kind": "digits"}}
        (folder / "digits.yaml").write_text(json.dumps(other))
        done = lockstep(folder, "train", "digits.yaml", "run.name=wrong")
    else:
        done = lockstep(folder, "train", "c.yaml", *settings, "run.name=wrong")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and message in said and "Traceback" not in said, said
