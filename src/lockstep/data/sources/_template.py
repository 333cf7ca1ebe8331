"""Your own data and model, ready to train: `lockstep init user` has written this file and its config.

It classifies tumours as malignant or benign by 30 measurements of cell nuclei (W. N. Street et al., 1993; 569 samples
that come with scikit-learn). Put your data into `source` and your network into `build`; the rest may be removed.
`lockstep prove` with the same config shows whether the weights stay independent of the number of processes.
"""

import numpy as np
import torch.nn.functional as F
from torch import nn

from lockstep import DataSpec, LossSum


class Table:
    """One split of the data: its number of samples, and any samples by index."""

    lengths = None  # for samples of different lengths, such as texts: an array with the length of each

    def __init__(self, features, labels, names):
        self.features, self.labels = features, labels
        self.spec = DataSpec(modality="table", labels=tuple(map(str, names)))  # `build` gets it

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        """Samples of a micro-batch: column name -> array [m, ...]. The model gets them as tensors."""
        rows = list(indices)
        return {"features": self.features[rows], "label": self.labels[rows]}


def source(options, split):
    """Return the "train" or "test" split; `options` are the config's data.options."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    is_test = np.arange(len(data.target)) % 5 == 4
    train, rows = data.data[~is_test], is_test if split == "test" else ~is_test
    features = (data.data - train.mean(0)) / train.std(0)  # the test split is scaled like the training split
    return Table(features[rows].astype(np.float32), data.target[rows].astype(np.int64), data.target_names)


class Network(nn.Module):
    """Features [m, 30] -> logits [m, classes]."""

    def __init__(self, width, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(width, classes)

    def forward(self, batch):
        """Map the columns of `source`, as tensors, to the outputs that `loss` gets."""
        return self.head(self.body(batch["features"]))


def build(options, spec):
    """Return the model; `options` are the config's model.options, such as {width: 64}."""
    return Network(options.get("width", 32), len(spec.labels))


def loss(outputs, batch):
    """Return the sum of the samples' losses, never their mean, and their number; further sums are logged.

    Without this function it is cross-entropy.
    """
    total = F.cross_entropy(outputs, batch["label"], reduction="sum")
    correct = (outputs.argmax(1) == batch["label"]).sum()
    return LossSum(total, len(outputs), {"accuracy": correct})


def metrics(spec):
    """Metrics of the test split besides accuracy and F1: torchmetrics by name."""
    from torchmetrics.classification import MulticlassAUROC

    return {"auroc": MulticlassAUROC(len(spec.labels))}
