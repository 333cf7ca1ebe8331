"""TensorBoard event files beside the one that a run appends to, written anew as a whole: a resume doubles nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def remove(folder: Path, name: str) -> None:
    """Remove the file of that name, where there is one."""
    for file in folder.glob(f"events.out.tfevents.*.{name}"):
        file.unlink(missing_ok=True)


def opened(folder: Path, **options: Any) -> Any:
    """Open a SummaryWriter, whose methods raise OSError where its thread could not write."""
    from torch.utils.tensorboard import SummaryWriter

    threading.excepthook = _report
    return SummaryWriter(str(folder), **options)


def _report(error: Any) -> None:
    """Print an error of a thread, unless a writer raises it as well: see `opened`."""
    if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(error)


@contextmanager
def replacing(folder: Path, name: str) -> Iterator[Any]:
    """Open a SummaryWriter for the file of that name, in the run of the folder's other files. Raises OSError."""
    remove(folder, name)
    writer = opened(folder, filename_suffix=f".{name}")
    try:
        yield writer
    finally:
        writer.close()
