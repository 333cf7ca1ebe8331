"""Statistics of modules in an opened step."""

import math

import pytest
import torch
from torch import nn

from lockstep.tools.replay.opened_step import ModuleStatistics, ranked


def test_statistics_of_outputs_and_gradients():
    model = nn.Sequential(nn.Identity(), nn.Tanh())
    statistics = ModuleStatistics(model)
    with statistics.watching():
        for values in ([0.0, 3.0, -4.0], [math.nan, math.inf, 1.0]):
            x = torch.tensor(values, requires_grad=True)
            (model(x) * 2).sum().backward()
    identity, tanh, _ = statistics.rows()
    assert identity["module"] == "0 (torch.nn.Identity)"
    assert identity["outputs"] == {
        "largest": 4.0,
        "rms": pytest.approx(math.sqrt(26 / 4)),
        "zeros": pytest.approx(1 / 6),
        "non_finite": pytest.approx(2 / 6),
        "saturated": pytest.approx(1 / 6),
    }
    assert tanh["outputs"]["saturated"] == pytest.approx(3 / 6)  # 3, -4 and inf
    assert tanh["gradients"]["rms"] == 2.0 and tanh["gradients"]["non_finite"] == 0
    assert not model[0]._forward_hooks


def test_without_gradients_there_are_none():
    model = nn.ReLU()
    statistics = ModuleStatistics(model)
    with statistics.watching(), torch.no_grad():
        model(torch.ones(2))
    assert statistics.rows()[0]["gradients"] is None


def test_what_is_broken_comes_before_what_is_hard():
    """Also a sample that the model is sure of and right about, so that it has neither loss nor gradient."""
    rows = [{"sample": n, "loss": 0.1 * n, "weight": 1.0 + n, "size": 1.0, "non_finite_inputs": 0} for n in range(8)]
    bright, wrong = {**rows[0], "loss": 0.0, "weight": 0.0, "size": 40.0}, {**rows[0], "loss": 9.0, "weight": 8.0}
    lost, spoilt = {**rows[0], "loss": float("nan")}, {**rows[0], "non_finite_inputs": 1}
    for kind, by in ((bright, "inputs"), (wrong, "loss"), (lost, "loss"), ({**rows[0], "weight": 1e5}, "gradient")):
        first, second, *_ = ranked([*rows, {**kind, "sample": 99}])
        assert (first["sample"], first["by"]) == (99, by) and first["stands_out"] > second["stands_out"]
    assert ranked([*rows, lost, {**spoilt, "sample": 99}])[0]["sample"] == 99
