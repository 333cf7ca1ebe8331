"""Lesson 8: mixed precision and gradient scaling. Run: python lessons/08_mixed_precision.py."""

import torch
from torch import nn
from torch.amp import GradScaler

from lockstep.run import teaching

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(options=None, spec=None):
    torch.manual_seed(0)
    return nn.Sequential(teaching.Pixels(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def update(scaler, optimizer, *, loss, count):
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # the loss times the scale, and so every gradient times the scale
    scaler.unscale_(optimizer)  # before anything that reads or changes gradients
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad *= 1 / count  # `loss` is a sum over samples
    scaler.step(optimizer)  # does nothing if a gradient is inf or nan
    scaler.update()  # halves the scale in that case; doubles it after 2,000 steps without


def main():
    torch.set_num_threads(1)
    for name, dtype in FORMATS.items():
        small, large, near = (torch.tensor(number, dtype=dtype).item() for number in (1e-8, 1e5, 1.001))
        print(f"{name}: 1e-8 becomes {small:.0e}, 1e5 becomes {large:.0e}, 1.001 becomes {near:.3f}")

    found, unscaled, scaled = [], GradScaler("cpu", init_scale=1.0), GradScaler("cpu")
    for true, scaler in [(1e-8, unscaled), (1e-8, scaled), (3.0, scaled), (3.0, scaled), (3.0, scaled)]:
        weight, scale = nn.Parameter(torch.ones(1, 1)), scaler.get_scale()
        with torch.autocast("cpu", torch.float16):
            output = torch.ones(1, 1) @ weight
        update(scaler, torch.optim.SGD([weight], lr=0.1), loss=output.float().sum() * true, count=1)
        found.append(weight.grad.item())  # `true`, if nothing is lost
        end = "step skipped" if scaler.get_scale() < scale else "step done"
        print(f"scale {scale:5.0f}: gradient {found[-1]:.0e} instead of {true:.0e}, {end}")
    assert found[0] == 0 and abs(found[1] / 1e-8 - 1) < 0.01 and found[2:] == [torch.inf, torch.inf, 3]

    data = teaching.digits("train")
    for kind in ("fp16", "bf16"):
        model, scaler = build(), GradScaler("cpu", enabled=kind == "fp16")  # bf16 has the range of fp32
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(69):
            (rows,) = teaching.order(1442, step, global_batch=64, micro_batch=64)
            with torch.autocast("cpu", FORMATS[kind]):
                outputs = model({"image": data["image"][rows]})  # matrix products in half precision
            assert outputs.dtype == FORMATS[kind] and model[1].weight.dtype == torch.float32
            loss = nn.functional.cross_entropy(outputs.float(), data["label"][rows], reduction="sum")
            update(scaler, optimizer, loss=loss, count=len(rows))
        recipe = ["train.steps=69", "train.global_batch=64", "train.micro_batch=64", f"train.precision={kind}"]
        print(teaching.compare(model, __file__, [*recipe, "optim.lr=0.1"], processes=1), f"({kind})")


if __name__ == "__main__":
    main()
