"""Lesson 10: a larger batch, its learning rate, and warm-up. Run: python lessons/10_learning_rate.py."""

import math

import torch
from torch import nn

from lockstep.run import teaching

TRAIN, TEST = teaching.digits("train"), teaching.digits("test")  # 1,442 and 355 images


def build(options=None, spec=None, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(teaching.Pixels(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def learning_rate(step, *, base, batch, warmup):
    """The linear rule: `base` is for batches of 32. During warm-up the rate grows by the same amount in each step."""
    peak = base * batch / 32
    return peak * (step + 1) / warmup if step < warmup else peak


def train(epochs, *, base, batch, rule=True, warmup=0, seed=0):
    """A trained model, and the share of the test images that it classifies correctly."""
    model = build(seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=base, momentum=0.9)
    for step in range(epochs * math.ceil(1442 / batch)):
        (rows,) = teaching.order(1442, step, global_batch=batch, micro_batch=batch)
        part = {name: values[rows] for name, values in TRAIN.items()}
        if rule:
            optimizer.param_groups[0]["lr"] = learning_rate(step, base=base, batch=batch, warmup=warmup)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(part), part["label"], reduction="sum").backward()
        for parameter in model.parameters():
            parameter.grad *= 1 / len(rows)
        optimizer.step()
    with torch.no_grad():
        return model, (model(TEST).argmax(1) == TEST["label"]).double().mean().item()


def main():
    torch.set_num_threads(1)
    choices = ((32, True), (256, False), (256, True))
    small, unscaled, scaled = (train(5, base=0.05, batch=batch, rule=rule)[1] for batch, rule in choices)
    assert small - unscaled > 0.1 and small - scaled < 0.04
    print(f"5 epochs: batch 32, rate 0.05: {small:.0%}; 256, 0.05: {unscaled:.0%}; 256, 0.40: {scaled:.0%}", flush=True)

    # A rate that is right for 32. Eight times as large, it is too much for the first weights, of three seeds.
    for batch, warmup, least, most in ((32, 0, 0.85, 1), (256, 0, 0, 0.65), (256, 24, 0.75, 1)):
        runs = [train(12, base=0.2, batch=batch, warmup=warmup, seed=seed) for seed in range(3)]
        assert all(least < right < most for _, right in runs)
        rate = f"rate {0.2 * batch / 32:.1f}, {warmup} steps of warm-up"
        print(f"12 epochs, three seeds: batch {batch}, {rate}: each between {least:.0%} and {most:.0%}")
    recipe = "train.steps=72 train.global_batch=256 train.micro_batch=256 optim.lr=0.2 optim.base_batch=32"
    print(teaching.compare(runs[0][0], __file__, [*recipe.split(), "schedule.warmup=24"], processes=1))


if __name__ == "__main__":
    main()
