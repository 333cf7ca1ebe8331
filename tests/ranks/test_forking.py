"""Runs that go on from a checkpoint of another: with other settings, or as if they had never seen some samples."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from members import further
from slowing import SLOWS
from training_runs import config_in as resolved_in
from training_runs import lines, run_on_rank

from lockstep.base import trust
from lockstep.base.errors import CheckpointError, ConfigError
from lockstep.data.order import Order
from lockstep.recipe import recipe as recipes
from lockstep.recipe.splits import open_splits
from lockstep.tools import fork

OWN = """
import numpy as np
from torch import nn
from torch.utils.data import Dataset


class Table(Dataset):
    classes = ["a", "b"]

    def __len__(self):
        return 90

    def __getitem__(self, index):
        return {"features": np.random.default_rng(index).normal(size=4).astype(np.float32), "label": index % 2}


def source(options, split):
    return Table()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, batch):
        return self.layers(batch["features"])


def build(options, spec):
    return Network()
"""
KEPT = {"every_steps": 1, "keep": 50}


def config_in(folder, name, data=(), **sections):
    """A config of `training_runs` as a command resolves it."""
    return resolved_in(folder, name, data={"image_processor": "none", **dict(data)}, **sections)


def planned(run, *settings, at=None, without=None, from_start=False):
    """The new run as a config, and the sentence on where it begins."""
    recipe, _, what = fork.planned(run, settings, at=at, without=without, from_start=from_start, trusts=True)
    return recipe.model_dump(mode="json"), what


def certificate(config):
    return json.loads((Path(config["run"]["dir"]) / config["run"]["name"] / "certificate.json").read_text())


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """A run of 14 steps that keeps all its checkpoints, with its summary."""
    folder = tmp_path_factory.mktemp("forked")
    (summary,) = ranks(1, run_on_rank, config_in(folder, "parent", checkpoint=KEPT))
    return folder / "parent", summary


@pytest.fixture
def parent(trained, tmp_path):
    """A copy of it, which a test may damage."""
    return shutil.copytree(trained[0], tmp_path / "parent"), trained[1]


def test_a_fork_goes_on_in_every_bit(ranks, parent):
    """Without other settings it is the same training; also where it is lost before its first checkpoint, and resumed."""
    run, before = parent
    config, what = planned(run, "checkpoint.every_steps=null", at=5)
    assert what == f"{run}-at-5 trains on after step 5 of {run}"
    after, _ = ranks(2, run_on_rank, config)
    assert [after[key] for key in ("digest", "chain", "steps", "drift")] == [before["digest"], before["chain"], 14, []]
    digest = json.loads((run / "checkpoints/step-000000005/manifest.json").read_text())["digest"]
    assert after["parent"] == {"run": str(run), "step": 5, "digest": digest}
    assert lines(run.parent, "parent-at-5")[0]["step"] == 6
    shutil.rmtree(run.parent / "parent-at-5" / "checkpoints")
    again = ranks(1, run_on_rank, config)[0]
    assert (again["digest"], again["parent"]) == (before["digest"], after["parent"])
    shutil.rmtree(run)
    assert ranks(1, run_on_rank, config)[0]["parent"] == after["parent"], "kept in its own checkpoints"


def test_a_fork_has_other_settings_and_says_which(ranks, parent):
    run, before = parent
    config, _ = planned(run, "optim.lr=0.5", "train.epochs=3", "run.name=new", at=9)
    found, other = (
        ranks(1, run_on_rank, config)[0],
        ranks(2, run_on_rank, {**config, "run": {**config["run"], "name": "o"}}),
    )
    assert found["steps"] == 21 and found["digest"] == other[0]["digest"] != before["digest"]
    changed = [(each["step"], each["field"], each["now"]) for each in found["drift"]]
    assert changed == [(9, "optim.lr", 0.5), (9, "train.epochs", 3.0)]
    page = (run.parent / "new" / "report.html").read_text()
    assert f"parent, step 9, digest {found['parent']['digest'][:16]}" in page and '"names": ["new", "parent"]' in page
    ranks(1, run_on_rank, {**config, "run": {**config["run"], "name": "cut"}}, "auto", 12)
    again = ranks(1, run_on_rank, {**config, "run": {**config["run"], "name": "cut"}})[0]
    assert (again["digest"], again["drift"]) == (found["digest"], found["drift"])


def test_the_newest_checkpoint_before_the_step_is_taken(parent):
    run, _ = parent
    for step in (6, 7, 13, 14):
        shutil.rmtree(run / f"checkpoints/step-{step:09}")
    (run / "checkpoints/step-000000012/manifest.json").write_text("{}")
    config, what = planned(run, at=7)
    assert config["run"]["parent"] == str(run / "checkpoints/step-000000005")
    assert what.endswith(f"on after step 5 of {run}, whose newest checkpoint up to step 7 this is")
    assert planned(run)[1].endswith(f"on after step 11 of {run}"), "the newest that is whole"
    assert planned(run / "checkpoints/step-000000003")[1].endswith(f"on after step 3 of {run}")


@pytest.mark.parametrize("setting", ["train.global_batch=64", "data.limit=100"])
def test_settings_that_move_the_place_in_the_data_are_refused(parent, setting):
    with pytest.raises(
        ConfigError, match=rf"{setting.partition('=')[0]} is .* in the run, and decides which place in the data"
    ):
        planned(parent[0], setting, at=3)


def test_what_cannot_be_gone_on_from_is_told(ranks, parent):
    run, _ = parent
    config, _ = planned(run, "train.ema=0.9", "run.name=average", at=3)
    (message,) = ranks(1, run_on_rank, config)
    assert re.search(r"belongs to another model: ema\..* is not in it", message)
    config, _ = planned(run, "run.name=lost", at=3)
    shutil.rmtree(config["run"]["parent"])
    for message in ranks(2, run_on_rank, config):
        assert re.match(r"CheckpointError: cannot go on from run\.parent=.*step-000000003: cannot be read", message)
    with pytest.raises(ConfigError, match="is a run already: choose another --name"):
        planned(run, "run.name=parent", at=5)
    shutil.rmtree(run / "checkpoints/step-000000001")
    shutil.rmtree(run / "checkpoints/step-000000002")
    with pytest.raises(
        CheckpointError,
        match=r"no whole checkpoint of step 2 or before; the oldest is of step 4\. --from-start .* 14 steps",
    ):
        planned(run, at=2)


def test_a_fork_forgets(ranks, tmp_path, parent):
    """The weights are those of a training that never saw the samples, on any number of processes."""
    run, _ = parent
    order = Order(seed=0, samples=200, global_batch=32, micro_batch=8)
    gone = [int(order.shards(4)[1][2]), int(order.shards(6)[0][0]), int(order.shards(5)[3][1])]
    (tmp_path / "gone.txt").write_text("".join(f"{number}\n" for number in gone))
    fresh = ranks(
        1, run_on_rank, config_in(tmp_path, "fresh", data={"limit": 200, "exclude": str(tmp_path / "gone.txt")})
    )[0]
    for processes in (1, 2, 3):
        config, what = planned(run, f"run.name=forgets-{processes}", without=tmp_path / "gone.txt")
        assert what.endswith(f"on after step 4 of {run}")
        found = ranks(processes, run_on_rank, config)[0]
        assert [found[key] for key in ("digest", "chain", "drift")] == [fresh["digest"], fresh["chain"], []]
        written = certificate(config)
        assert written["digest"] == fresh["digest"] and written["samples"] == sorted(gone)
        assert written["from"] == found["parent"] and found["parent"]["step"] == 4
        assert "for the first time in step 5; they are left out from step 5 on" in written["why"]
    config, _ = planned(run, "run.name=anew", without=tmp_path / "gone.txt", from_start=True)
    assert ranks(2, run_on_rank, config)[0]["digest"] == certificate(config)["digest"] == fresh["digest"]
    assert certificate(config)["from"] == "the start"


def test_a_second_fork_forgets_more(ranks, tmp_path, parent):
    """From a checkpoint of the first, whose samples stay left out."""
    run, _ = parent
    order = Order(seed=0, samples=200, global_batch=32, micro_batch=8)
    gone = [int(order.shards(3)[0][0]), int(order.shards(6)[0][1])]
    for name, number in zip("ab", gone, strict=True):
        (tmp_path / f"{name}.txt").write_text(f"{number}\n")
    first, _ = planned(run, without=tmp_path / "a.txt")
    ranks(1, run_on_rank, first)
    second, what = planned(tmp_path / "parent-without-a", without=tmp_path / "b.txt")
    assert what.endswith(f"on after step 6 of {tmp_path / 'parent-without-a'}")
    found = ranks(2, run_on_rank, second)[0]
    data = {"limit": 200, "exclude": [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]}
    assert found["digest"] == ranks(1, run_on_rank, config_in(tmp_path, "fresh", data=data))[0]["digest"]
    assert certificate(second)["samples"] == sorted(gone)


def test_no_certificate_where_there_is_no_such_training(ranks, tmp_path, parent):
    """Where earlier steps had the samples, or other settings have changed as well."""
    run, _ = parent
    order = Order(seed=0, samples=200, global_batch=32, micro_batch=8)
    (tmp_path / "gone.txt").write_text(f"{order.shards(2)[0][0]}\n")
    for name, settings, at in (("late", [], 5), ("mixed", ["optim.lr=0.1"], None)):
        config, _ = planned(run, f"run.name={name}", *settings, at=at, without=tmp_path / "gone.txt")
        assert ranks(1, run_on_rank, config)[0]["drift"]
        assert not (tmp_path / name / "certificate.json").exists()
        told = (tmp_path / name / "history.jsonl").read_text()
        assert "there will be no certificate.json" in told
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoints/step-{step:09}")
    with pytest.raises(
        CheckpointError,
        match=r"no whole checkpoint of step 2 or before \(step 3 was the first with one of these samples\); the oldest is of step 3\. --from-start trains anew: 14 steps, about 0\.\d min",
    ):
        planned(run, without=tmp_path / "gone.txt")


def test_balanced_class_weights_have_counted_the_samples(ranks, tmp_path):
    balanced = config_in(
        tmp_path,
        "b",
        checkpoint=KEPT,
        train={"class_weights": "balanced", "epochs": 1, "global_batch": 100, "micro_batch": 50},
    )
    ranks(1, run_on_rank, balanced)
    (tmp_path / "gone.txt").write_text("5\n")
    with pytest.raises(ConfigError, match="class_weights=balanced has counted .*--from-start"):
        planned(tmp_path / "b", without=tmp_path / "gone.txt")
    with pytest.raises(ConfigError, match="class_weights=balanced has counted .*--from-start"):
        planned(tmp_path / "b", without=tmp_path / "gone.txt", at=1)
    config, _ = planned(tmp_path / "b", "run.name=c", f"data.exclude={tmp_path / 'gone.txt'}", at=1)
    assert ranks(1, run_on_rank, config)[0]["drift"]
    assert not (tmp_path / "c" / "certificate.json").exists()
    config, _ = planned(tmp_path / "b", without=tmp_path / "gone.txt", from_start=True)
    assert ranks(1, run_on_rank, config)[0]["status"] == "finished"


def test_what_an_observer_has_asked_for_at_the_fork_is_done(ranks, tmp_path):
    """It takes effect after the checkpoint at which the run is forked, and is not asked again."""
    (tmp_path / "slows.py").write_text(SLOWS)
    observe = {"file": str(tmp_path / "slows.py")}
    train = {"steps": 4, "epochs": None}
    (whole,) = ranks(1, run_on_rank, config_in(tmp_path, "a", observe=observe, checkpoint=KEPT, train=train))
    (plain,) = ranks(1, run_on_rank, config_in(tmp_path, "b", checkpoint=KEPT, train=train))
    assert whole["digest"] != plain["digest"]
    before = (tmp_path / "a" / "steering.jsonl").read_bytes()
    for at in (1, 2, 3):
        config, _ = planned(tmp_path / "a", f"run.name=at-{at}", at=at)
        assert ranks(1, run_on_rank, config)[0]["digest"] == whole["digest"]
    assert (tmp_path / "a" / "steering.jsonl").read_bytes() == before


def test_a_certificate_does_not_outlive_what_it_says(ranks, tmp_path, parent):
    run, _ = parent
    (tmp_path / "gone.txt").write_text("7\n")
    config, _ = planned(run, "run.name=c", without=tmp_path / "gone.txt", from_start=True)
    ranks(1, run_on_rank, config)
    assert certificate(config)["samples"] == [7]
    again = {**config, "data": {**config["data"], "exclude": []}, "train": {**config["train"], "epochs": 3}}
    assert isinstance(ranks(1, run_on_rank, again, "auto", None, True)[0], dict)
    assert not (tmp_path / "c" / "certificate.json").exists()


MIX = [{"kind": "digits", "limit": 90}, {"kind": "digits", "weight": 2}]


def saved_bert(folder, minilm):
    """A tiny encoder with random weights."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["table", "own"])
def test_tables_and_data_of_ones_own_forget(ranks, tmp_path, minilm, kind):
    """Rows of a user, of texts that are sorted by length; samples by number, of any data set."""
    if kind == "table":
        saved_bert(tmp_path / "bert", minilm)
        rows = [f"{'goal match ' * (number % 7 + 1)}{number},{number % 2},u{number}" for number in range(90)]
        (tmp_path / "t.csv").write_text("\n".join(["text,label,user", *rows]))
        data = {"kind": "files", "train": str(tmp_path / "t.csv"), "cache": str(tmp_path / "cache"), "limit": None}
        sections = {"data": {**data, "group_by_length": 2, "image_processor": "none"}}
        sections["model"] = {"kind": "transformer", "name": str(tmp_path / "bert"), "max_length": 16}
    else:
        (tmp_path / "own.py").write_text(OWN)
        trust.own(trust.code_with_imports(tmp_path / "own.py"))
        sections = {"data": {"kind": "user", "file": str(tmp_path / "own.py"), "limit": None}}
        sections["model"] = {"kind": "user", "file": str(tmp_path / "own.py")}
    sections["train"] = {"epochs": None, "steps": 6, "global_batch": 12, "micro_batch": 4}
    parent = resolved_in(tmp_path, "parent", checkpoint=KEPT, **sections)
    ranks(2, run_on_rank, parent)
    data = open_splits(recipes.of_sections(parent))
    number = int(data.order().shards(4)[1][0])
    users = data.train.source.cells(["user"])[0] if kind == "table" else ()
    (tmp_path / "gone.csv").write_text(f"user\n{users[number]}\n" if users else f"{number}\n")
    config, what = planned(tmp_path / "parent", without=tmp_path / "gone.csv")
    assert "on after step 4 of" in what
    found = ranks(3, run_on_rank, config)[0]
    fresh = {**parent, "run": {**parent["run"], "name": "fresh"}}
    fresh["data"] = {**parent["data"], "exclude": str(tmp_path / "gone.csv")}
    assert found["digest"] == ranks(1, run_on_rank, fresh)[0]["digest"] == certificate(config)["digest"]
    depends = "their lengths" if kind == "table" else "what data.file computes"
    assert depends in " ".join(certificate(config)["depends_on"])


@pytest.mark.parametrize("kind", ["mixture", "chats", *further("texts")])
def test_mixtures_and_packed_texts_forget(ranks, tmp_path, kind):
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    chats = ({"messages": said, "user": f"u{number}"} for number in range(160))
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, chats)))
    generator = np.random.default_rng(0)
    (tmp_path / "t.txt").write_text("\n".join(" ".join(generator.choice(["a", "bc", "def"], 9)) for _ in range(400)))
    packed = {"context": 24, "cache": str(tmp_path / "cache"), "limit": None, "tokenizer": "bytes"}
    sections = {
        "mixture": {"data": {"kind": "mix", "sources": MIX, "samples_per_epoch": 150, "image_processor": "none"}},
        "chats": {"data": {"kind": "chat", "train": str(tmp_path / "c.jsonl"), **packed}},
        "texts": {"data": {"kind": "text", "train": str(tmp_path / "t.txt"), **packed}},
    }[kind]
    if kind != "mixture":
        sections["model"] = {"kind": "gpt", "width": 16, "heads": 2, "layers": 1}
        sections["evaluate"] = {"sample_tokens": 0}
    sections["train"] = {"epochs": None, "steps": 6, "global_batch": 12, "micro_batch": 4}
    parent = resolved_in(tmp_path, "parent", checkpoint=KEPT, **sections)
    ranks(2, run_on_rank, parent)
    data = open_splits(recipes.of_sections(parent))
    first = {int(n): step for step in reversed(range(6)) for shard in data.order().shards(step) for n in shard}
    (tmp_path / "gone.csv").write_text(f"{next(n for n, step in first.items() if step == 3)}\n")
    if kind == "chats":
        users = {int(n): {line - 1 for line in _lines_of(data.train, n)} for n in first}
        users = [u for u in range(160) if 3 <= min((first[n] for n, held in users.items() if u in held), default=0) < 6]
        (tmp_path / "gone.csv").write_text(f"user\nu{users[0]}\n")
    config, what = planned(tmp_path / "parent", without=tmp_path / "gone.csv")
    assert re.search(r"on after step [345] of", what), what
    found = ranks(1, run_on_rank, config)[0]
    fresh = {**parent, "run": {**parent["run"], "name": "fresh"}}
    fresh["data"] = {**parent["data"], "exclude": str(tmp_path / "gone.csv")}
    assert found["digest"] == ranks(3, run_on_rank, fresh)[0]["digest"] == certificate(config)["digest"]


def _lines_of(windows, number):
    """Lines of the chats of which a sample holds a token."""
    offsets, size = windows.tokens.offsets, windows.context
    for line, start, stop in zip(windows.tokens.source.lines, offsets[:-1], offsets[1:], strict=True):
        if start <= (number + 1) * size and stop > number * size:
            yield line
