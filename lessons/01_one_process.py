"""Lesson 1: one process trains a model. Run: python lessons/01_one_process.py."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep.run import teaching

STEPS, BATCH, RATE = 69, 64, 0.1  # three epochs


class Net(nn.Module):
    """One hidden layer; a batch is a dict of tensors, as Lockstep makes them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, batch):
        return self.layers(batch["image"].float() / 255)


def build(options=None, spec=None):
    """First weights that follow from the seed; the arguments are what Lockstep passes."""
    torch.manual_seed(0)
    return Net()


def main():
    """The loop that every later lesson spreads over processes."""
    torch.set_num_threads(1)
    train, test = teaching.digits("train"), teaching.digits("test")  # 1,442 and 355 images of 8 x 8 pixels
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        (rows,) = teaching.order(1442, step, global_batch=BATCH, micro_batch=BATCH)  # another permutation in each epoch
        batch = {name: values[rows] for name, values in train.items()}
        loss = cross_entropy(model(batch), batch["label"], reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad *= 1 / len(rows)  # the mean: the last batch of an epoch holds fewer samples
        optimizer.step()
        if (step + 1) % 23 == 0:
            with torch.no_grad():
                right = (model(test).argmax(1) == test["label"]).sum().item()
            print(f"step {step + 1}: loss {loss.item() / len(rows):.2f}, {right / 355:.0%} of the test images right")
    recipe = [f"train.steps={STEPS}", f"train.global_batch={BATCH}", f"train.micro_batch={BATCH}", f"optim.lr={RATE}"]
    print(teaching.compare(model, __file__, recipe, processes=1))


if __name__ == "__main__":
    main()
