"""Lesson 20: which row broke a training? Run: python lessons/20_replay.py."""

import copy

import torch
from torch.nn.functional import cross_entropy, dropout

ROWS, BATCH, KEEP = 400, 16, 10
BROKEN = 135  # the planted fault: one row, 40 times as large as it should be, with the wrong label

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(ROWS, 8)
y = (x.sum(1) > 0).long()
x[BROKEN], y[BROKEN] = 40 * x[BROKEN], 1 - y[BROKEN]


def rows_of(step):
    """The rows of a step, from its number alone."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[step * BATCH : (step + 1) * BATCH]


def loss_of(model, step, which=slice(None)):
    """The loss of a step's rows, or of `which` of them; dropout draws from the step's own seed."""
    rows = rows_of(step)
    torch.manual_seed(1000 + step)
    outputs = model[1](dropout(torch.relu(model[0](x[rows])), 0.2))
    return cross_entropy(outputs[which], y[rows][which], reduction="sum") / len(rows)


def train(model, optimizer, steps):
    """Train these steps -> their losses, and copies of model and optimizer every KEEP steps."""
    losses, kept = {}, {}
    for step in steps:
        if step % KEEP == 0:
            kept[step] = copy.deepcopy((model, optimizer.state_dict()))
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses, kept


model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
losses, kept = train(model, torch.optim.Adam(model.parameters(), 0.01), range(ROWS // BATCH))
spike = max(range(1, len(losses)), key=lambda step: losses[step] / losses[step - 1])
print(f"step {spike}: the loss jumps from {losses[spike - 1]:.2f} to {losses[spike]:.2f}")

start = spike // KEEP * KEEP  # the newest copy before it
again, state = copy.deepcopy(kept[start])
(optimizer := torch.optim.Adam(again.parameters(), 0.01)).load_state_dict(state)
replayed, _ = train(again, optimizer, range(start, spike))
print(f"steps {start} to {spike - 1} again: same losses, {all(replayed[step] == losses[step] for step in replayed)}")

parts = [torch.autograd.grad(loss_of(again, spike, [i]), again.parameters()) for i in range(BATCH)]
norms = [sum(each.norm() ** 2 for each in part) for part in parts]  # of what each row adds to the gradient
worst = rows_of(spike)[torch.stack(norms).argmax()].item()
print(f"of {BATCH} rows, row {worst} has {max(norms) / sum(norms):.1%} of the sum of the squared norms")
assert worst == BROKEN
