"""Which steps are marked as spikes: jumps are, trends and noise are not, and a resume changes none of it."""

import json
import math
import random

import pytest

from lockstep.observe.diagnose.spikes import LEAST, MOST_FOUND, QUIET, Spikes


def curve(steps, seed, noise=0.3):
    """A loss that falls, and a gradient norm that rises, both with noise of factors."""
    draw = random.Random(seed)
    return [
        {"loss": 3 * math.exp(-n / 100) * draw.lognormvariate(0, noise), "gradient_norm": 1 + n / 50 + draw.random()}
        for n in range(steps)
    ]


def marked(values, spikes=None):
    spikes = spikes or Spikes()
    return [step for step, each in enumerate(values, 1) if spikes.look(step, **each)]


@pytest.mark.parametrize("seed", range(10))
def test_trends_and_noise_are_no_spikes(seed):
    assert marked(curve(500, seed)) == []


@pytest.mark.parametrize("at", [LEAST + 1, 100, 400])
@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_a_jump_is_one_spike(name, at):
    values = curve(500, 1, noise=0.1)
    for step, height in enumerate((40, 20, 10, 5), at):  # it takes some steps to recover
        values[step - 1][name] *= height
    spikes = Spikes()
    assert marked(values, spikes) == [at]
    (found,) = spikes.found
    assert found.keys() == {"step", name, f"{name}_before"} and found["step"] == at
    assert found[name] == values[at - 1][name] > 10 * found[f"{name}_before"]


def test_a_jump_of_both_is_one_line():
    spikes = Spikes()
    for step in range(1, 51):
        assert not spikes.look(step, loss=1 + step % 7 / 10, gradient_norm=2 + step % 5 / 10)
    found = spikes.look(51, loss=50.0, gradient_norm=1e30)
    assert found == {"loss": (50.0, 1.3), "gradient_norm": (1e30, 2.2)}


def test_what_comes_too_early_or_cannot_be_compared_is_none():
    assert marked([{"loss": 1.0}] * (LEAST - 1) + [{"loss": 100.0}]) == []
    for value in (math.nan, math.inf, 0.0, -5.0):
        spikes = Spikes()
        assert marked([{"loss": 1.0}] * 50 + [{"loss": value}] * 50 + [{"loss": 1.0}], spikes) == []
        assert set(spikes.recent["loss"]) == {1.0}
    assert marked([{"loss": -1.0 - n % 3} for n in range(100)] + [{"loss": 50.0}]) == []
    assert marked([{"loss": 1e300}] * 50 + [{"loss": 5e-324}] * 70 + [{"loss": 1e300}]) == [121]


def test_a_new_level_is_marked_once_and_a_later_jump_again():
    values = [{"loss": 1.0 + n % 5 / 10} for n in range(100)]
    values += [{"loss": 30.0 + n % 5} for n in range(100)] + [{"loss": 900.0}]
    assert marked(values) == [101, 201]
    twice = [{"loss": 1.0 + n % 5 / 10} for n in range(100)]
    twice[60]["loss"] = twice[60 + QUIET]["loss"] = 50.0
    assert marked(twice) == [61]


@pytest.mark.parametrize("at", [1, 47, 60, 61, 75])
def test_a_resume_marks_the_same_steps(at):
    values = curve(150, 2, noise=0.1)
    for step in (60, 62, 90):
        values[step]["loss"] *= 30
    whole, before = Spikes(), Spikes()
    steps = marked(values, whole)
    marked(values[:at], before)
    resumed = Spikes(**json.loads(json.dumps(before.state_dict())))
    again = [step for step, each in enumerate(values[at:], at + 1) if resumed.look(step, **each)]
    assert again == [step for step in steps if step > at]
    assert resumed.state_dict() == whole.state_dict()


def test_the_list_has_an_end():
    spikes = Spikes()
    for step in range(1, 50 * (MOST_FOUND + 10)):
        spikes.look(step, loss=100.0 if step % 50 == 49 else 1 + step % 3 / 10)
    assert len(spikes.found) == MOST_FOUND
