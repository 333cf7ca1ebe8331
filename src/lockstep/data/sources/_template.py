"""Your own data and model, to be trained as it is: `lockstep init user` has written this file and its config.

It tells malignant from benign tumours by 30 measurements of cell nuclei: W. N. Street et al., 1993; 569 samples that
come with scikit-learn. Put your own data into `source` and your own network into `build`; the rest may be removed.
`lockstep prove` with the same config shows whether the weights stay independent of the number of processes.
"""

import numpy as np
import torch.nn.functional as F
from torch import nn

from lockstep import DataSpec, LossSum


class Table:
    """One split of the data: its number of samples, and any of them at once."""

    lengths = None  # for samples of different lengths, such as texts: an array with the length of each

    def __init__(self, features, labels, names):
        self.features, self.labels = features, labels
        self.spec = DataSpec(modality="table", labels=tuple(map(str, names)))  # what `build` is told of the data

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        """The samples of a micro-batch: column name -> array [m, ...]. The model gets them as tensors."""
        rows = list(indices)
        return {"features": self.features[rows], "label": self.labels[rows]}


def source(options, split):
    """The "train" or "test" split; `options` is what the config has under data.options."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    is_test = np.arange(len(found.target)) % 5 == 4
    train, rows = found.data[~is_test], is_test if split == "test" else ~is_test
    features = (found.data - train.mean(0)) / train.std(0)  # the test split is scaled as the training split is
    return Table(features[rows].astype(np.float32), found.target[rows].astype(np.int64), found.target_names)


class Network(nn.Module):
    """Features [m, 30] -> logits [m, classes]."""

    def __init__(self, width, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(width, classes)

    def forward(self, batch):
        """The columns of `source`, as tensors, to what `loss` gets."""
        return self.head(self.body(batch["features"]))


def build(options, spec):
    """The model; `options` is what the config has under model.options, such as {width: 64}."""
    return Network(options.get("width", 32), len(spec.labels))


def loss(outputs, batch):
    """The sum of the samples' losses, never their mean, and how many they are; further sums are logged.

    Without this function it is cross-entropy.
    """
    total = F.cross_entropy(outputs, batch["label"], reduction="sum")
    right = (outputs.argmax(1) == batch["label"]).sum()
    return LossSum(total, len(outputs), {"accuracy": right})


def metrics(spec):
    """Measured on the test split, beside accuracy and F1: torchmetrics by name."""
    from torchmetrics.classification import MulticlassAUROC

    return {"auroc": MulticlassAUROC(len(spec.labels))}
