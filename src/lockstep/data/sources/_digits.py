"""scikit-learn's bundled handwritten digits: 1,797 images of 8x8, no download."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from lockstep.base import plugins
from lockstep.data.images import fitted
from lockstep.data.in_memory import Images
from lockstep.data.sources.digits import Config


def build(config: Config, split: str) -> Images:
    """Load the "train" or "test" split; every fifth image of each class is a test image. Source: E. Alpaydin, C.
    Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998; grey values 0..16."""
    table = _table()
    labels = table[:, -1].astype(np.int64)
    images = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    rows = np.flatnonzero(is_test == (split == "test"))
    return Images(fitted(images[rows], config), labels[rows], [str(digit) for digit in range(10)])


@cache
def _table() -> NDArray[np.float64]:
    """Return pixels and label, [1797, 65], from the file itself: importing scikit-learn takes two seconds."""
    return np.loadtxt(plugins.package_folder("sklearn") / "datasets" / "data" / "digits.csv.gz", delimiter=",")
