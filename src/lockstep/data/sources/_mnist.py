"""MNIST: 60,000 training and 10,000 test images of handwritten digits, 28x28, from IDX files."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import pooch
import requests

from lockstep.base.errors import DataError
from lockstep.data.images import fitted
from lockstep.data.in_memory import Images
from lockstep.data.sources.mnist import Config

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
"""Checksums of the official archives; checked after a download only, since local files may be recompressed."""
CONNECT_SECONDS, READ_SECONDS = 2.0, 30.0
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
MOST_BYTES = 1 << 30
"""Limit of an unpacked file: twenty times MNIST's."""
HINT = "it is damaged or not MNIST; replace it, or remove it to have it fetched"


def build(config: Config, split: str) -> Images:
    """Load the "train" or "test" split, uint8 [N, 1, 28, 28].

    Source: Y. LeCun, C. Cortes, C. Burges; the format is described at yann.lecun.com/exdb/mnist.
    Raises DataError for damaged files, or for missing ones that cannot be downloaded.
    """
    stem = "train" if split == "train" else "t10k"
    archives = [f"{stem}-images-idx3-ubyte.gz", f"{stem}-labels-idx1-ubyte.gz"]
    if not all(_find(config.root, archive) for archive in archives):
        for archive in MD5:  # also those of the other split
            if not _find(config.root, archive):
                _fetch(config.root / "mnist", archive)
    images_file, labels_file = (_find(config.root, a) or config.root / "mnist" / a for a in archives)
    images = _read(images_file, IMAGES_MAGIC, (28, 28))
    labels = _read(labels_file, LABELS_MAGIC, ())
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} holds {len(images)} images, but {labels_file} {len(labels)} labels: they do not "
            f"belong together; replace both, or remove both to have them fetched"
        )
    if labels.max(initial=0) > 9:
        raise DataError(f"{labels_file} holds the label {labels.max()}, but digits are 0 to 9: {HINT}")
    return Images(fitted(images[:, None], config), labels, [str(digit) for digit in range(10)])


def _find(root: Path, archive: str) -> Path | None:
    paths = (folder / name for folder in (root / "mnist", root) for name in (archive, archive.removesuffix(".gz")))
    return next((path for path in paths if path.is_file()), None)


def _fetch(folder: Path, archive: str) -> None:
    """Download a file, and verify its checksum."""
    downloader = pooch.HTTPDownloader(timeout=(CONNECT_SECONDS, READ_SECONDS))
    reasons = []
    for mirror in MIRRORS:
        try:
            pooch.retrieve(mirror + archive, f"md5:{MD5[archive]}", archive, folder, downloader=downloader)
        except (OSError, ValueError) as error:  # no network, a full disk; a wrong checksum
            is_away, reason = isinstance(error, requests.ConnectionError), str(error).partition("\n")[0]
            reasons.append(f"{mirror}: {'cannot be reached' if is_away else reason}")
            if isinstance(error, requests.ConnectTimeout):
                break  # packets are dropped: every address of the next mirror would cost CONNECT_SECONDS, too
        else:
            return
    raise DataError(
        f"MNIST is not there and cannot be fetched: put {', '.join(MD5)} (or the same unpacked, without "
        f".gz) into {folder}, or set data.root to their folder ({'; '.join(reasons)})"
    )


def _read(path: Path, magic: int, shape: tuple[int, ...]) -> np.ndarray:
    """Read an IDX file as uint8 [N, *shape]: magic number, N and shape as big-endian int32, then the bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): {HINT}") from error
    head = 4 * (2 + len(shape))
    file_magic, count, *file_shape = np.frombuffer(data[:head].ljust(head, b"\0"), dtype=">i4").tolist()
    if len(data) < head or file_magic != magic:
        raise DataError(f"{path} does not begin with an IDX header of magic number {magic}: {HINT}")
    if tuple(file_shape) != shape:
        raise DataError(f"{path} holds images of {file_shape[0]}x{file_shape[1]}, not {shape[0]}x{shape[1]}: {HINT}")
    size = head + count * int(np.prod(shape))
    if len(data) != size:
        raise DataError(f"{path} is {len(data)} bytes long unpacked, but its header says {size}: {HINT}")
    return np.frombuffer(data, dtype=np.uint8, offset=head).reshape(count, *shape)
