"""Training samples that a run leaves out (data.exclude): by number or by a column, the others as if they were not there."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import config_in, run_on_rank

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, DataError
from lockstep.data.dataset import EvenRows, Subset
from lockstep.data.exclusion import excluded_samples
from lockstep.data.mixture import Joined
from lockstep.data.order import Order
from lockstep.data.packing import Windows
from lockstep.recipe import recipe as recipes
from lockstep.recipe.splits import open_splits

ROWS = """
import numpy as np
from lockstep import DataSpec
from torch import nn


class Table:
    lengths = None
    spec = DataSpec(modality="table", labels=("a", "b"))

    def __init__(self, count, wrong):
        generator = np.random.default_rng(count)
        self.x, self.y = generator.normal(size=(count, 4)).astype(np.float32), generator.integers(0, 2, count)
        self.x[wrong] = np.nan

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return {"features": self.x[indices], "label": self.y[indices]}


def source(options, split):
    return Table(60 if split == "train" else 20, options["wrong"] if split == "train" else [])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, batch):
        return self.layers(batch["features"])


def build(options, spec):
    return Network()
"""
WRONG = [3, 4, 17, 59]


@pytest.fixture
def config(tmp_path):
    """Makes configs of runs on 60 rows, of which those with these numbers are NaN."""
    (tmp_path / "own.py").write_text(ROWS)

    def config(name, wrong=WRONG, train=(), exclude=None, **sections):
        file = str(tmp_path / "own.py")
        data = {"kind": "user", "file": file, "options": {"wrong": wrong}, "limit": None}
        if exclude is not None:
            (tmp_path / f"{name}.txt").write_text("".join(f"{number}\n" for number in exclude))
            data["exclude"] = str(tmp_path / f"{name}.txt")
        sizes = {"epochs": 2, "global_batch": 12, "micro_batch": 4, **dict(train)}
        return config_in(tmp_path, name, data=data, model={"kind": "user", "file": file}, train=sizes, **sections)

    return config


def test_excluded_samples_are_as_if_they_were_not_there(ranks, tmp_path, config):
    """Rows of NaN are not read at all, on any number of processes; a run that had other values in them is no other."""
    found = [
        ranks(1, run_on_rank, config("one", exclude=WRONG, parallel={"kind": "single"})),
        ranks(2, run_on_rank, config("two", exclude=WRONG)),
        ranks(3, run_on_rank, config("three", exclude=WRONG)),
        ranks(2, run_on_rank, config("parts", exclude=WRONG, parallel={"kind": "fsdp"})),
        ranks(1, run_on_rank, config("other", wrong=[3], exclude=WRONG)),
    ]
    assert [summary["status"] for summary, *_ in found] == ["finished"] * 5
    assert len({(summary["digest"], summary["chain"]) for summary, *_ in found}) == 1
    assert found[0][0]["excluded_samples"] == 4 and found[0][0]["bad_samples"] == {}
    assert "4 of 60 samples" in found[0][0]["numeric_recipe"]["data.excluded"]
    (message,) = ranks(1, run_on_rank, config("all"))
    assert "NaN" in message


def test_a_micro_batch_of_excluded_samples_alone_counts_for_nothing(ranks, tmp_path, config):
    """Micro-batches of one sample, without BatchNorm's statistics of one."""
    train = {"epochs": 1, "global_batch": 10, "micro_batch": 1}
    (tmp_path / "own.py").write_text(ROWS.replace("nn.BatchNorm1d(8), ", ""))
    found = [
        ranks(world, run_on_rank, config(f"{world}", exclude=[*range(40), 59], wrong=[*range(40)], train=train))[0]
        for world in (1, 3)
    ]
    assert [summary["excluded_samples"] for summary in found] == [41, 41]
    assert found[0]["digest"] == found[1]["digest"]


def test_other_excluded_samples_are_another_recipe(ranks, tmp_path, config):
    whole = ranks(1, run_on_rank, config("a", exclude=WRONG))[0]
    ranks(2, run_on_rank, config("b", exclude=WRONG), "auto", 5)
    (message,) = ranks(1, run_on_rank, config("b", exclude=[*WRONG, 20]))
    assert re.search(r"data\.excluded: '4 of 60 samples, sha256 \w+' in the checkpoint, '5 of 60 .*' now", message)
    (message,) = ranks(1, run_on_rank, config("b"))
    assert "data.excluded: '4 of 60" in message and "None now" in message
    same = config("b", exclude=[59, 17, 4, 3, 3])
    same["data"]["exclude"] = [str(Path(same["data"]["exclude"]).rename(tmp_path / "renamed.txt"))]
    assert ranks(1, run_on_rank, same)[0]["digest"] == whole["digest"]


class Rows:
    lengths, spec = None, DataSpec(modality="table", labels=("a", "b"))

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitems__(self, indices):
        return {}

    def cells(self, names):
        return [self.columns[name] for name in names]


USERS = Rows(user=["ann", "bob", None, "ann", "7"], day=[1, 2, 3, 2, 5], note=["", "a ", "", "b", " a"])


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("3\n\n1\n3\n", "a.txt", [1, 3]),
        ("0\r\n", "a.jsonl", [0]),
        ("user\nann\n7\n", "a.csv", [0, 3, 4]),
        ("user,day\nann,2\n", "a.csv", [3]),
        ("user\tday\nann\t1\n", "a.tsv", [0]),
        ('user,day\n"",3\n', "a.csv", [2]),
        ("user\tnote\nann\t\n", "a.tsv", [0]),
        ("note\na \n", "a.csv", [1]),
    ],
)
def test_samples_are_named_by_number_or_by_columns(tmp_path, text, name, expected):
    (tmp_path / name).write_text(text)
    assert excluded_samples([tmp_path / name], USERS).tolist() == expected


def test_several_files_and_parts_of_sources(tmp_path):
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "b.csv").write_text("user\nann\n")
    both = Joined([USERS, Subset(USERS, EvenRows(2, 5)), Subset(USERS, np.array([4, 3]))], ["a", "b", "c"])
    assert excluded_samples([tmp_path / "a.txt", tmp_path / "b.csv"], both).tolist() == [0, 1, 3, 5, 8]
    assert excluded_samples([], both).tolist() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no training sample"),
        ("user\n", "names no training sample"),
        ("1\nx\n", "line 2: 'x' is no number of a sample; each line holds one, such as 17"),
        (f"1\n{'1' * 5000}\n", "line 2: '111"),
        ("1\n\n5\n", "line 3: there is no training sample 5: they are numbered 0 to 4"),
        ("0\n1\n2\n3\n4\n", "data.exclude leaves no training sample"),
        ("user\nann\neve\n", "line 3: no training sample has user 'eve'; remove the line"),
        ("user,day\nann\n", "line 2 has 1 values for the columns user, day"),
    ],
)
def test_what_names_no_sample_is_told_with_its_line(tmp_path, text, said):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=re.escape(said)):
        excluded_samples([tmp_path / "a.csv"], USERS)


def test_data_without_a_table_and_files_that_are_not_there_are_told(tmp_path):
    (tmp_path / "a.csv").write_text("user\nann\n")
    source = Rows(x=[1])
    source.cells = None
    with pytest.raises(DataError, match="by user, but this data has no table with columns: name them by number"):
        excluded_samples([tmp_path / "a.csv"], source)
    with pytest.raises(DataError, match="there is no file"):
        excluded_samples([tmp_path / "b.csv"], source)


def opened(**data):
    return open_splits(recipes.Recipe.model_validate({"data": data, "model": {"kind": "user", "file": "own.py"}}))


def test_rows_of_a_table_are_found_by_any_of_its_columns(tmp_path):
    """Also where a part of the table is held out, and the rest is limited."""
    users = [f"u{number % 7}" for number in range(50)]
    rows = [f"text {number},{'ab'[number % 2]},{user}" for number, user in enumerate(users)]
    (tmp_path / "t.csv").write_text("\n".join(["text,label,user", *rows]))
    (tmp_path / "x.csv").write_text("user\nu3\n")
    data = {"kind": "files", "train": str(tmp_path / "t.csv"), "limit": 30}
    splits = opened(**data, exclude=str(tmp_path / "x.csv"))
    texts = splits.train.__getitems__(range(30))["text"]
    expected = [n for n, text in enumerate(texts) if int(text.split()[1]) % 7 == 3]
    assert splits.excluded.tolist() == expected and expected
    (tmp_path / "x.csv").write_text("usr\nu3\n")
    with pytest.raises(DataError, match=r"t\.csv has no column 'usr' \(there is: text, label, user\)"):
        opened(**data, exclude=str(tmp_path / "x.csv"))


def test_a_part_of_the_data_leaves_the_same_samples_out(tmp_path):
    """As proofs and the search for a micro-batch take one."""
    (tmp_path / "x.txt").write_text("3\n4\n90\n")
    splits = opened(kind="digits", exclude=str(tmp_path / "x.txt"))
    part = splits.renumbered(np.array([90, 5, 3]))
    assert part.excluded.tolist() == [0, 2] and part.faults["train"].excluded == {0, 2}
    assert splits.excluded.tolist() == [3, 4, 90] and splits.faults["train"].excluded == {3, 4, 90}


def test_chats_are_found_by_the_keys_of_their_lines(tmp_path):
    """Each sample with a token of one of them is left out."""
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    chats = ({"messages": said, "user": f"u{number % 9}"} for number in range(40))
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "x.csv").write_text("user\nu3\n")
    data = {"kind": "chat", "train": str(tmp_path / "c.jsonl"), "context": 24, "cache": str(tmp_path / "cache")}
    splits = open_splits(
        recipes.of_sections({"data": {**data, "exclude": str(tmp_path / "x.csv")}, "model": {"kind": "gpt"}})
    )
    tokens = splits.train.tokens
    lost = [n for n, line in enumerate(tokens.source.lines) if (line - 1) % 9 == 3]
    ids = {place for n in lost for place in range(tokens.offsets[n], tokens.offsets[n + 1])}
    expected = [i for i in range(len(splits.train)) if ids & {*range(24 * i, 24 * i + 25)}]
    assert splits.excluded.tolist() == expected and 0 < len(expected) < len(splits.train)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=30), st.integers(1, 7), st.data())
def test_the_samples_that_hold_a_text_are_all_that_have_one_of_its_tokens(lengths, context, data):
    offsets = np.cumsum([0, *lengths])
    if offsets[-1] <= context:
        return
    tokens = type("Tokens", (), {"ids": np.arange(offsets[-1]), "offsets": offsets})()
    windows = Windows(tokens, np.zeros(3, dtype=np.int64), context=context)
    texts = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))))
    mine = {place for text in texts for place in range(offsets[text], offsets[text + 1])}
    expected = [i for i in range(len(windows)) if mine & {*range(i * context, (i + 1) * context + 1)}]
    assert windows.holding(texts).tolist() == expected


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(1, 20), st.integers(0, 99), st.data())
def test_the_first_use_is_that_of_the_order(samples, global_batch, seed, data):
    order = Order(seed=seed, samples=samples, global_batch=global_batch, micro_batch=min(3, global_batch))
    wanted = data.draw(st.sets(st.integers(0, samples - 1)))
    stop = data.draw(st.integers(0, 2 * order.steps_per_epoch))
    steps = [step for step in range(stop) if wanted & {int(n) for rows in order.shards(step) for n in rows}]
    assert order.first_use(np.array(sorted(wanted), dtype=np.int64), stop) == (steps[0] if steps else None)


def test_what_cannot_leave_samples_out_is_refused_by_name(tmp_path):
    (tmp_path / "x.txt").write_text("0\n")
    (tmp_path / "t.txt").write_text("some words\n" * 900)
    data = {"kind": "text", "train": str(tmp_path / "t.txt"), "tokenizer": "bpe", "exclude": str(tmp_path / "x.txt")}
    with pytest.raises(ConfigError, match="data.tokenizer=bpe learns from all texts"):
        open_splits(recipes.of_sections({"data": {**data, "cache": str(tmp_path)}, "model": {"kind": "gpt"}}))
    stream = "def source(options, split):\n    return S()\nclass S:\n    def __iter__(self):\n        yield from [{'x': 1.0}] * 9\n"
    (tmp_path / "own.py").write_text(stream)
    trust.own(trust.code_with_imports(tmp_path / "own.py"))
    with pytest.raises(ConfigError, match=r"data\.exclude leaves samples out by their number, but .* is a stream"):
        opened(kind="user", file=str(tmp_path / "own.py"), exclude=str(tmp_path / "x.txt"))
    with pytest.raises(ConfigError, match=r"exclude belongs to the whole mix"):
        recipes.of_sections({"data": {"kind": "mix", "sources": [{"kind": "digits", "exclude": "x.txt"}]}})
