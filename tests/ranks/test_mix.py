"""Several sources as one: exact shares of each epoch, each sample equally often, equal weights on any world."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import lockstep, started, summary, wait_for_steps, workers
from training_runs import config_in, run_on_rank

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, DataError
from lockstep.data.mixture import Joined, Mixture
from lockstep.data.order import Order
from lockstep.recipe.recipe import numeric_recipe, of_sections

SPEC = DataSpec(modality="table", labels=("a", "b"))


class Rows:
    def __init__(self, count, start=0, spec=SPEC, lengths=None, **columns):
        self.count, self.start, self.spec, self.lengths, self.columns = count, start, spec, lengths, columns

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        found = np.asarray(indices) + self.start
        return {"x": found, **{name: make(found) for name, make in self.columns.items()}}


def joined(*parts):
    return Joined(parts, [f"source {number}" for number in range(len(parts))])


mixtures = st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0.1, 0.5, 1, 2, 3.7])), min_size=1, max_size=4)


@settings(deadline=None)
@given(mixtures, st.integers(0, 2**63 - 1))
def test_by_default_an_epoch_has_seen_each_source_once(parts, seed):
    sizes, weights = zip(*parts, strict=True)
    mixture = Mixture(seed=seed, sizes=sizes, weights=weights)
    assert sum(mixture.counts) == mixture.samples
    assert all(count >= size - 1 for count, size in zip(mixture.counts, sizes, strict=True)), "but for rounding"
    for count, weight in zip(mixture.counts, weights, strict=True):
        assert abs(count - mixture.samples * weight / sum(weights)) <= 1


@settings(deadline=None)
@given(mixtures, st.integers(1, 200), st.integers(0, 2**63 - 1))
def test_each_epoch_has_its_shares_and_samples_come_equally_often(parts, length, seed):
    sizes, weights = zip(*parts, strict=True)
    mixture = Mixture(seed=seed, sizes=sizes, weights=weights, samples_per_epoch=length)
    seen = np.zeros(sum(sizes), dtype=int)
    bounds = np.cumsum([0, *sizes])
    for epoch in range(3):
        rows = mixture.rows(epoch, np.arange(length))
        found = np.histogram(rows, bins=bounds)[0]
        assert found.tolist() == list(mixture.counts)
        np.add.at(seen, rows, 1)
        for start, stop in zip(bounds, bounds[1:], strict=False):
            assert seen[start:stop].max() - seen[start:stop].min() <= 1


def test_a_few_samples_of_a_mix_are_mixed_alike():
    mixture = Mixture(seed=5, sizes=(100, 50, 50), weights=(1, 1, 2))
    few = mixture.spread(20)
    assert (few.sizes, few.counts) == ((10, 5, 5), (5, 5, 10))
    assert mixture.spread(200) is mixture
    assert mixture.spread(1) is None


def test_a_draw_is_computed_alone():
    mixture = Mixture(seed=5, sizes=(10**8, 30, 7), weights=(2, 1, 1))
    draws = np.array([0, 10**8 - 1, 10**8, 2 * 10**8 - 1, 123_456_789])
    together = mixture.rows(3, draws)
    assert together.tolist() == [int(mixture.rows(3, draws[[n]])[0]) for n in range(len(draws))]
    assert mixture.rows(4, draws).tolist() != together.tolist()
    assert replace(mixture, seed=6).rows(3, draws).tolist() != together.tolist()


def test_the_draws_never_change_silently():
    mixture = Mixture(seed=7, sizes=(6, 3), weights=(2, 1), samples_per_epoch=6)
    order = Order(seed=7, samples=6, mixed=mixture.rows, global_batch=3, micro_batch=2)
    assert [[shard.tolist() for shard in order.shards(step)] for step in range(4)] == [
        [[2, 4], [8]],
        [[5, 1], [7]],
        [[6, 3], [2]],
        [[8, 5], [0]],
    ]


def test_columns_come_in_the_order_of_the_samples():
    source = joined(Rows(4), Rows(3, start=100, text=lambda rows: [str(row) for row in rows]))
    with pytest.raises(DataError, match=re.escape("source 1 gives the columns ['x', 'text'], but another")):
        source.__getitems__([0, 5])
    text = {"text": lambda rows: [str(row) for row in rows]}
    source = joined(Rows(4, **text), Rows(3, start=100, **text), Rows(2, start=200, **text))
    found = source.__getitems__([8, 0, 5, 3, 4])
    assert found["x"].tolist() == [201, 0, 101, 3, 100]
    assert found["text"] == ["201", "0", "101", "3", "100"]
    assert len(source) == 9


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(SPEC, labels=("a", "c")), "`labels` of their samples is ('a', 'b') and ('a', 'c')"),
        (replace(SPEC, modality="image"), "`modality` of their samples is 'table' and 'image'"),
    ],
)
def test_sources_that_differ_are_told(other, said):
    with pytest.raises(DataError, match=re.escape(f"source 0 and source 1 cannot be mixed: {said}")):
        joined(Rows(1), Rows(1, spec=other))


def test_lengths_are_those_of_all_or_of_none():
    lengths = np.array([3, 4])
    assert joined(Rows(2, lengths=lengths), Rows(2, lengths=lengths)).lengths.tolist() == [3, 4, 3, 4]
    with pytest.raises(DataError, match="source 1 gives the lengths of its samples and source 0 does not"):
        joined(Rows(1), Rows(1, lengths=np.array([3])))


def test_dtypes_that_differ_are_told():
    source = joined(Rows(1, y=lambda rows: rows * 1.0), Rows(1, y=lambda rows: rows.astype(np.float32)))
    with pytest.raises(DataError, match="the column 'y' is float32 and float64 in sources that are mixed"):
        source.__getitems__([0, 1])


DIGITS = [{"kind": "digits", "weight": 2}, {"kind": "digits", "limit": 100}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{"weight": 2}]}, "each source of a mix needs a kind of its own"),
        ({"sources": [{"kind": "digit"}]}, "there is no 'digit' — did you mean 'digits'?"),
        ({"sources": [{"kind": "text"}]}, "data.kind=text cannot be mixed"),
        ({"sources": [{"kind": "digits", "lmit": 1}]}, "unknown key — did you mean 'limit'?"),
        ({"sources": [{"kind": "digits", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"kind": "digits", "workers": 1}]}, "workers belongs to the whole mix: set data.workers"),
        ({"sources": DIGITS, "limit": 1}, "limit=1 leaves nothing of some of the 2 sources"),
        ({"sources": [*DIGITS, {"kind": "files", "train": "a.csv"}]}, "samples of different kinds"),
        (
            {"sources": [{"kind": "user", "file": "a.py"}, {"kind": "user", "file": "b.py"}]},
            "the sources name several Python files",
        ),
    ],
)
def test_what_cannot_be_mixed_is_told(data, said):
    model = {"kind": "user", "file": "m.py"}
    with pytest.raises(ConfigError, match=re.escape(said)):
        of_sections({"data": {"kind": "mix", **data}, "model": model})


def test_weights_are_part_of_the_numeric_recipe_and_paths_are_not():
    def numeric(**more):
        parts = [{"kind": "mnist", **more}, {"kind": "mnist"}]
        return numeric_recipe(of_sections({"data": {"kind": "mix", "sources": parts}}), {})

    assert numeric(root="elsewhere") == numeric()
    assert numeric(weight=2) != numeric()
    assert numeric(limit=5) != numeric()


def test_the_same_weights_on_any_world(ranks, tmp_path):
    data = {"kind": "mix", "sources": DIGITS, "limit": None, "samples_per_epoch": 210}
    found = [
        ranks(world, run_on_rank, config_in(tmp_path, str(world), data=data | {"workers": world - 1}))[0]
        for world in (1, 2, 3)
    ]
    assert len({each["digest"] for each in found}) == 1
    assert found[0]["samples_seen"] == 420
    other = [{**DIGITS[0], "weight": 3}, DIGITS[1]]
    changed = ranks(1, run_on_rank, config_in(tmp_path, "other", data=data | {"sources": other}))[0]
    assert changed["digest"] != found[0]["digest"]


def test_a_mix_survives_a_kill(tmp_path):
    sections = {
        "data": {"kind": "mix", "sources": DIGITS},
        "train": {"epochs": 2, "global_batch": 32, "micro_batch": 8},
        "checkpoint": {"every_steps": 4},
        "observe": {"log_every": 1},
        "launch": {"max_restarts": 0},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    whole = lockstep(tmp_path, "train", "c.yaml", "run.name=whole", "launch.processes=1")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    process = started(tmp_path, "train", "c.yaml", "run.name=killed", "launch.processes=2")
    wait_for_steps(tmp_path / "runs/killed", 10)
    workers(process)[1].kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    again = lockstep(tmp_path, "train", "c.yaml", "run.name=killed", "launch.processes=1")
    assert "resumed after step" in again.stdout, again.stdout + again.stderr
    assert summary(tmp_path, "killed")["digest"] == summary(tmp_path, "whole")["digest"]
