"""scikit-learn's bundled real handwritten digits: 1,797 images of 8x8, nothing to download."""

import numpy as np

from lockstep.base import plugins
from lockstep.data.in_memory import Images
from lockstep.data.sources.digits import Config


def build(config: Config, split: str) -> Images:
    """The "train" or "test" split: of each class, every fifth image is for the test.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998; grey values 0..16.
    The file is read from scikit-learn's folder: importing scikit-learn for it would take two seconds a process.
    """
    table = np.loadtxt(plugins.package_folder("sklearn") / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    labels = table[:, -1].astype(np.int64)
    images = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    place = np.zeros(len(labels), dtype=np.int64)
    for label in range(10):
        place[labels == label] = np.arange(np.sum(labels == label))
    rows = np.flatnonzero((place % 5 == 4) == (split == "test"))
    return Images(images[rows], labels[rows], [str(digit) for digit in range(10)])
