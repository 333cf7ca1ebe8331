"""scikit-learn's bundled real handwritten digits: 1,797 images of 8x8, nothing to download."""

import numpy as np

from lockstep.data.memory import Images
from lockstep.data.section import DataSection


class Config(DataSection):
    """scikit-learn's bundled handwritten digits: 1,437 training and 360 test images of 8x8, ten classes."""


def build(config: Config, split: str) -> Images:
    """The "train" or "test" split: a fixed, stratified fifth is the test.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998; grey values 0..16.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    parts = train_test_split(np.arange(len(images)), test_size=0.2, random_state=0, stratify=bunch.target)
    rows = np.sort(parts[0 if split == "train" else 1])
    return Images(images[rows], bunch.target[rows], [str(digit) for digit in bunch.target_names])
