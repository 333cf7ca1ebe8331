"""One digest per recipe, whatever the number of processes: {models} x {formats} x {how the step is cut} x {W}.

Each time a covering sample runs, in which any two values of any two factors meet, with worlds of 2, 3 and 5; one row
meets those of 4 and 8. `make test-matrix` runs all.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from recipe_rows import CLIP, CONTEXT, EPOCHS, FIRST_SCALE, Row, config_of, make_small_transformer

from lockstep.base.world import World
from lockstep.core.numerics.digest import digest
from lockstep.core.numerics.precision import fix_numerics
from lockstep.recipe import build
from lockstep.recipe.recipe import Recipe
from lockstep.training.step import step

FACTORS = Row(
    ("normed", "transformer", "noisy", "gpt"), ("fp32", "bf16", "fp16"), (4, 20), (CLIP, None), (0, 2), (62, 80)
)
WORLDS = (2, 3, 4, 5, 8)
"""Each against one process."""
SAMPLED = (2, 3, 5)
ROWS = [Row(*values) for values in itertools.product(*FACTORS)]


def meetings(row, worlds):
    """Every two values that meet in a row and its worlds, as (factor, value) pairs."""
    values = list(zip(Row._fields, row, strict=True))
    beside = [(value, ("world", world)) for value in values for world in worlds]
    return {*itertools.combinations(values, 2), *beside}


def covering_sample():
    """Rows with a world or two, picked one after the other: always the one in which most values meet anew."""
    worlds = [*itertools.combinations(SAMPLED, 1), *itertools.combinations(SAMPLED, 2)]  # of equal ones the first
    cases = [*itertools.product(ROWS, worlds)]
    by_case = {case: meetings(*case) for case in cases}
    missing, chosen = set().union(*by_case.values()), []
    while missing:
        best = max(cases, key=lambda case: len(by_case[case] & missing))
        missing -= by_case[best]
        chosen.append(best)
    return chosen


@pytest.fixture(scope="session")
def small_transformer(tmp_path_factory):
    return make_small_transformer(tmp_path_factory.mktemp("small"))


def train_on_rank(config):
    """The run's steps on this rank -> digests before and after, and what each step told."""
    recipe = Recipe.model_validate(config)
    fix_numerics(threads=1, exact=True)
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    parts = build.assemble(recipe, world, torch.device("cpu"))
    first, told = digest(parts.strategy.state()), []
    for micro_batches in parts.steps(0):
        outcome = step(parts.state, micro_batches, clip=recipe.optim.clip)
        told.append((int(outcome.loss.count), float(outcome.loss.total).hex(), float(outcome.norm).hex()))
    return {
        "first": first,
        "last": digest(parts.strategy.state()),
        "everything": digest(parts.state.tensors()),
        "told": told,
        "scaler": parts.state.precision.state_dict(),
    }


def assert_something_happened(row, found, other_seed):
    """Equal digests mean nothing where nothing was trained, or where the row's settings had no effect."""
    assert found["first"] != found["last"] != other_seed["last"]
    counts, losses, norms = zip(*found["told"], strict=True)
    each = CONTEXT if row.model == "gpt" else 1
    assert counts == (40 * each, (row.samples - 40) * each) * EPOCHS
    assert len(set(losses)) == len(losses)
    assert all(math.isfinite(float.fromhex(loss)) for loss in losses)
    finite = [norm for norm in map(float.fromhex, norms) if math.isfinite(norm)]
    if row.clip:
        assert max(finite) > row.clip
    if row.precision == "fp16":  # each overflow halves the scale; the steps after the last one are counted
        overflows = len(norms) - len(finite)
        assert overflows < len(norms)
        assert found["scaler"]["scale"] == FIRST_SCALE / each / 2**overflows > 1
    else:
        assert found["scaler"] == {}
        assert len(finite) == len(norms)


def compare(ranks, row, worlds, small_transformer):
    """One process, the same with another seed, and each of the worlds."""
    (alone,) = ranks(1, train_on_rank, config_of(row, small_transformer))
    (other_seed,) = ranks(1, train_on_rank, config_of(row, small_transformer, seed=1))
    assert_something_happened(row, alone, other_seed)
    for world in worlds:
        for rank, found in enumerate(ranks(world, train_on_rank, config_of(row, small_transformer))):
            assert found == alone, f"{world} processes, rank {rank}"


SAMPLE = covering_sample()


def test_the_sample_covers_every_pair():
    met = set().union(*(meetings(row, worlds) for row, worlds in SAMPLE))
    assert met == set().union(*(meetings(row, SAMPLED) for row in ROWS))
    assert len(SAMPLE) <= 14


def test_the_matrix_can_tell(ranks, small_transformer):
    """The backend's own sum, in an order that belongs to the ranks, does give other weights on three processes."""
    config = config_of(ROWS[0], small_transformer)
    config["run"]["reproducibility"] = "fast"
    assert ranks(1, train_on_rank, config)[0]["last"] != ranks(3, train_on_rank, config)[0]["last"]


@pytest.mark.parametrize(
    ("row", "worlds"),
    cases := [*SAMPLE, (next(row for row in ROWS if row.model == "noisy"), (4, 8))],
    ids=[f"{row.name}-1,{','.join(map(str, worlds))}" for row, worlds in cases],
)
def test_sample(ranks, small_transformer, row, worlds):
    compare(ranks, row, worlds, small_transformer)


@pytest.mark.matrix
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_all(ranks, small_transformer, row):
    compare(ranks, row, WORLDS, small_transformer)
