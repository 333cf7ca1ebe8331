"""TensorBoard event files beside the one that a run appends to, written anew as a whole: a resume doubles nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def remove(folder: Path, name: str) -> None:
    """Remove the file of that name, where there is one."""
    for file in folder.glob(f"events.out.tfevents.*.{name}"):
        file.unlink(missing_ok=True)


@contextmanager
def replacing(folder: Path, name: str) -> Iterator[Any]:
    """A SummaryWriter for the file of that name, in the same run as the other files of the folder. Raises OSError."""
    from torch.utils.tensorboard import SummaryWriter

    remove(folder, name)
    writer = SummaryWriter(str(folder), filename_suffix=f".{name}")
    try:
        yield writer
    finally:
        writer.close()
