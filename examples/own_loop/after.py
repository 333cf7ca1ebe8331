"""A plain PyTorch script: a small network learns the handwritten digits of scikit-learn."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def digits():
    """Images [N, 64] from 0 to 1, and labels [N]."""
    found = load_digits()
    return TensorDataset(torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target))


def main():
    lockstep.seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = lockstep.Loop(model, optimizer, digits(), folder="runs/mine", global_batch=64, micro_batch=16, epochs=5)
    for step in loop:
        for x, y in step:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            step.backward(loss)
        if step.ends_epoch:
            loop.print(f"epoch {step.epoch}: loss {step.loss:.4f}")


if __name__ == "__main__":
    main()
