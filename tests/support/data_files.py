"""Files in the formats of MNIST and AG News, where the real ones are not at hand."""

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


def write_news(folder):
    """2,400 short texts of four classes for training, 400 for a test."""
    folder.mkdir(parents=True)
    (folder / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n")
    topics = ("elections treaty minister", "match season goal", "shares profit market", "chips software network")
    rng = np.random.default_rng(0)
    for split, count in (("train", 2400), ("test", 400)):
        labels = rng.integers(0, 4, count)
        texts = [" ".join(rng.choice(topics[label].split(), 12)) for label in labels]
        rows = [f'"{label + 1}","","{text} {n}"\n' for n, (label, text) in enumerate(zip(labels, texts, strict=True))]
        (folder / f"{split}.csv").write_text("".join(rows))


def write_digits(folder):
    """scikit-learn's digits, enlarged to MNIST's size."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pictures = np.kron(found.images * 15, np.ones((3, 3))).astype(np.uint8)
    pictures, labels = np.pad(pictures, ((0, 0), (2, 2), (2, 2))), found.target.astype(np.uint8)
    folder.mkdir(parents=True)
    for stem, rows in (("train", slice(0, 1437)), ("t10k", slice(1437, None))):
        for name, data in (("images-idx3", idx(pictures[rows], 2051)), ("labels-idx1", idx(labels[rows], 2049))):
            (folder / f"{stem}-{name}-ubyte.gz").write_bytes(gzip.compress(data))
