"""The folder that a run writes to."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.base.errors import ConfigError
from lockstep.recipe import run_paths
from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext

SCOPE = "config"
SLOW_SECONDS = 0.5
BYTES_PER_PARAMETER = 12
"""Size in a checkpoint: weights, and two moments, in fp32."""


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    folder = existing(context.recipe.run.dir)
    probe = folder / f".lockstep-doctor-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as error:
        yield Diagnosis.error(
            "LS-RUN-01",
            f"{folder} cannot be written to: {error.strerror}",
            "choose another run.dir, or change its permissions",
        )
        return
    try:
        yield from _probe(probe)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    if context.recipe.run.name is not None:
        try:
            run_paths.check_folder(context.recipe.folder)
        except ConfigError as error:
            yield Diagnosis.error("LS-RUN-05", str(error), "choose another run.name")
    bytes_each = BYTES_PER_PARAMETER * context.parameters
    needed, free = bytes_each * (context.recipe.checkpoint.keep + 1), shutil.disk_usage(folder).free
    if free < needed:
        yield Diagnosis.error(
            "LS-RUN-04",
            f"{folder} has {free / 1e9:.1f} GB free, and {context.recipe.checkpoint.keep} checkpoints and "
            f"one that is being written need about {needed / 1e9:.1f} GB",
            "lower checkpoint.keep, free some space, or choose another run.dir",
        )


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest path above that exists: the run makes the folders in it."""
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


def _probe(folder: Path) -> Iterator[Diagnosis]:
    file, renamed = folder / "a", folder / "b"
    start = time.monotonic()
    try:
        with file.open("wb") as opened:
            opened.write(b"x" * (1 << 20))
            opened.flush()
            os.fsync(opened.fileno())
        (folder / "c").mkdir()
        os.replace(file, renamed)
        os.replace(folder / "c", folder / "d")
    except OSError as error:
        yield Diagnosis.error(
            "LS-RUN-02",
            f"{folder.parent} cannot hold checkpoints: writing, syncing or renaming failed ({error.strerror})",
            "choose a run.dir on a local disk, or on a network file system with atomic renames",
        )
        return
    seconds = time.monotonic() - start
    if seconds > SLOW_SECONDS:
        yield Diagnosis.warning(
            "LS-RUN-03",
            f"writing and syncing 1 MiB in {folder.parent} takes {seconds:.1f} s",
            "choose a faster disk for run.dir, or save less often (checkpoint.every_steps)",
        )
