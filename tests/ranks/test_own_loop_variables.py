"""What lockstep.Loop keeps for a script in checkpoints, besides weights and optimizer."""

import math

import pytest
import torch
from own_loops import SIZES, Net, Points, losses
from torch.optim import lr_scheduler

import lockstep


def test_variables_and_a_scheduler_of_all_steps_are_kept(ranks, tmp_path):
    """A loop that is left after step 4 goes on as if it had not been, on other processes."""
    whole = ranks(1, best_of, tmp_path / "whole", None)[0]
    ranks(2, best_of, tmp_path / "own", 4)
    assert ranks(3, best_of, tmp_path / "own", None) == [whole] * 3
    best, rates = whole
    assert best["step"] > 1
    assert rates == pytest.approx([0.1 * (1 - number / len(rates)) for number in range(len(rates))])


def best_of(folder, until):
    lockstep.seed(3)
    model = Net()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = lockstep.Loop(model, own, Points(), folder=folder, scheduler=linear, save_steps=1, **SIZES)
    kept = loop.variables
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
        loop.scheduler.step()
        kept.setdefault("rates", []).append(step.learning_rate)
        if step.loss < kept.get("best", {"loss": math.inf})["loss"]:
            kept["best"] = {"loss": step.loss, "step": step.number}
        if loop.done == until:
            loop.stop()
            break
    return kept["best"], kept["rates"]


def linear(optimizer, steps):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
