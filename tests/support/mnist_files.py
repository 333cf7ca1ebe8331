"""MNIST's files with noise in them."""

import gzip

import numpy as np


def idx(array, magic):
    return np.array([magic, *array.shape], dtype=">i4").tobytes() + array.tobytes()


def write_mnist(folder, *, packed=True, counts=(("train", 5), ("t10k", 3))):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for stem, count in counts:
        pictures = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        digits = (np.arange(count) % 10).astype(np.uint8)
        for name, data in (("images-idx3", idx(pictures, 2051)), ("labels-idx1", idx(digits, 2049))):
            path = folder / f"{stem}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
