"""Statistics of modules in an opened step."""

import math

import pytest
import torch
from torch import nn

from lockstep.tools.replay.opened_step import ModuleStatistics


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
