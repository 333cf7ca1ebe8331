"""Texts of language models from a column of a data set: Parquet, JSON lines, and what `datasets` has saved."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from pydantic import ValidationError
from running import lockstep, summary

from lockstep.base.errors import DataError
from lockstep.data.packing import BEGIN, END
from lockstep.data.sources import _hub, _text, hub
from lockstep.data.sources.text import Config
from lockstep.recipe.recipe import Recipe, load
from lockstep.recipe.splits import open_splits

STORIES = [f"story {number} of caf\u00e9 {number % 7}" * (number % 5 + 1) for number in range(60)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same stories in each form."""
    folder = tmp_path_factory.mktemp("rows")
    table = datasets.Dataset.from_dict({"story": STORIES, "number": [*range(60)], "label": [0, 1] * 30})
    for kind in ("parquet", "jsonl"):
        (folder / kind).mkdir()
    table.to_parquet(folder / "parquet" / "train.parquet")
    rows = (json.dumps(row, ensure_ascii=False) for row in table)
    (folder / "jsonl" / "stories.jsonl").write_text("\n".join(rows))
    table.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=table, more=table.select(range(9))).save_to_disk(folder / "splits")
    return folder


def config(name, **settings):
    return Config(kind="text", name=str(name), text_column="story", **settings)


def texts(source):
    found = source.__getitems__(range(len(source)))["text"]
    assert all(not each or each.startswith(BEGIN) for each in found)
    return [each.removeprefix(BEGIN) for each in found]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "saved", "splits"])
def test_every_form_gives_the_rows(folder, form):
    train, test = (texts(_text.build(config(folder / form), split)) for split in ("train", "test"))
    assert len(test) == 6 and sorted(train + test) == sorted(each + END for each in STORIES)
    settings = {"train_split": "train[10%:40%]", "test_split": "train[90%:]"}
    train, test = (_text.build(config(folder / form, **settings), split) for split in ("train", "test"))
    assert texts(train) == [each + END for each in STORIES[6:24]]
    assert texts(test) == [each + END for each in STORIES[54:]]
    assert train.__getitems__([3, 0])["text"] == [BEGIN + STORIES[9] + END, BEGIN + STORIES[6] + END]


def test_splits_of_a_saved_data_set(folder):
    found = texts(_text.build(config(folder / "splits", test_split="more"), "test"))
    assert found == [each + END for each in STORIES[:9]]
    found = texts(_text.build(config(folder / "splits", train_split="more+train[:5%]", test_split="more"), "train"))
    assert found == [each + END for each in STORIES[:9] + STORIES[:3]]
    classifier = hub.Config(kind="hub", name=str(folder / "splits"), text_column="story", test_split="more")
    assert _hub.build(classifier, "test").texts == STORIES[:9]


def test_other_rows_have_other_tokens(folder, tmp_path):
    """The cache knows them apart, without reading them, and knows equal ones again."""
    chosen = [{}, {}, {"train_split": "train[:50%]", "test_split": "train"}, {"text_column": "number"}]
    settings = [{"text_column": "story", **each} for each in chosen]
    sources = [_text.build(Config(kind="text", name=str(folder / "saved"), **each), "train") for each in settings]
    found = [each.fingerprint for each in sources]
    assert found[0] == found[1] and len({*found}) == 3
    changed = []
    for text in ("one", "two"):
        datasets.Dataset.from_dict({"story": [text] * 20}).save_to_disk(tmp_path / "set")
        changed.append(_text.build(config(tmp_path / "set"), "train").fingerprint)
    assert changed[0] != changed[1]


def test_rows_without_a_text(tmp_path):
    table = datasets.Dataset.from_dict({"story": ["a", None, "", "b\uffff"] * 5})
    table.save_to_disk(tmp_path / "set")
    settings = {"name": tmp_path / "set", "test_split": "train"}
    with pytest.raises(DataError, match=r"row 2 of .*set, split train has no text: remove the row, or name another"):
        texts(_text.build(config(**settings), "train"))
    found = texts(_text.build(config(**settings, on_bad_sample="skip"), "train"))
    assert found[:4] == [f"a{END}", "", END, f"b\ufffd{END}"]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"text_column": "title"}, "has no column 'title': set data.text_column to one that is there (story, number"),
        ({"train_split": "valid"}, "cannot load the split 'valid' of the data set"),
        ({"train_split": "train[:1]"}, "holds too little to hold a part out: name another split for data.test_split"),
        ({"text_column": "number"}, "row 1 of {name}, split train has 0 for a text"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_message(folder, settings, message):
    name = str(folder / "saved")
    with pytest.raises(DataError) as caught:
        texts(_text.build(Config(kind="text", name=name, **{"text_column": "story"} | settings), "train"))
    assert message.format(name=name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "owner/set", "train": "a.txt"}, "give either name or train"),
        ({"name": "owner/set", "test": "a.txt"}, "give either name or train"),
        ({"test_split": "test"}, "test_split belongs to a data set: give its name, too"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValidationError, match=message):
        Config(kind="text", **settings)


def test_documents_are_rows_and_training_is_the_same_on_any_cluster(folder, monkeypatch):
    """By the command line."""
    monkeypatch.chdir(folder)
    data = {"kind": "text", "name": "saved", "text_column": "story", "context": 32, "documents": "apart"}
    recipe = {
        "data": {**data, "cache": "cache"},
        "model": {"kind": "gpt", "layers": 1, "width": 16, "heads": 2},
        "train": {"steps": 4, "global_batch": 8, "micro_batch": 2},
        "evaluate": {"sample_tokens": 0},
    }
    Path("c.yaml").write_text(json.dumps(recipe))
    found = []
    for name, processes in (("one", 1), ("two", 2)):
        done = lockstep(folder, "train", "c.yaml", f"run.name={name}", f"launch.processes={processes}")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(summary(folder, name)["digest"])
    assert found[0] == found[1]
    splits = open_splits(load(Path("c.yaml")))
    ends = np.flatnonzero(splits.train.ids == 256)
    assert (splits.train.starts[1:] == ends[:-1] + 1).all() and len(ends) == 54
    origin = Recipe.model_validate(recipe).data.origin()
    assert (origin.name, origin.hub, origin.split) == ("saved", None, "train")
