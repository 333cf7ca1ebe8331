"""A plain PyTorch script: a small network learns the handwritten digits of scikit-learn."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits():
    """Images [N, 64] from 0 to 1, and labels [N]."""
    found = load_digits()
    return TensorDataset(torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(digits(), batch_size=64, shuffle=True)
    for epoch in range(5):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
