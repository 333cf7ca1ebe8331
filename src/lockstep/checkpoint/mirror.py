"""Copies of a run's checkpoints in an object store (checkpoint.mirror), for when its machine and disk are gone."""

import os
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.base.config import MANY
from lockstep.base.errors import CheckpointError, UserError
from lockstep.base.events import CheckpointSaved, StepDone, Warned
from lockstep.base.remote_path import RemotePath
from lockstep.checkpoint.layout import MANIFEST, folder_of, listed, read_manifest, step_of
from lockstep.checkpoint.verify import problem
from lockstep.core.host import remote_storage

LINKS = "mirrored.tmp-"
"""Prefix of folders with hard links to files that are being copied."""


class Mirror:
    """Observer on rank 0 that copies a folder of checkpoints to an object store, in a thread.

    A checkpoint's manifest is copied last: without it, there is no checkpoint. Errors are warnings: training goes on,
    and the next checkpoint, or the next start, tries again.
    """

    def __init__(self, root: Path, place: RemotePath, publish: Callable[[object], None]) -> None:
        """`root`: the folder of checkpoints on disk; `place`: where their copies are."""
        self.root, self.place, self.publish = root, place, publish
        self._problems: list[str] = []
        self._last_step = MANY
        self._is_due, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def prepare(self, resume: str) -> None:
        """Copy the newest intact checkpoint at the place to disk for resume="auto", unless the disk has one as new.

        Raises CheckpointError where the place cannot be read, or the run would replace checkpoints that are only there.
        """
        try:
            steps = _steps(self.place)
        except UserError as error:
            raise CheckpointError(f"checkpoint.mirror: {error}") from None
        on_disk = listed(self.root)
        if resume != "auto":
            if only_there := steps - {step_of(folder) for folder in on_disk}:
                raise CheckpointError(
                    f"{self.place} holds checkpoints that are not on disk, the newest of step {max(only_there):,}: "
                    f"--resume {resume} would replace them. Choose another run.name or checkpoint.mirror"
                )
            return
        newest = next((step_of(folder) for folder in on_disk if problem(folder) is None), -1)
        self._restore(sorted((step for step in steps if step > newest), reverse=True))

    def _restore(self, steps: Iterable[int]) -> None:
        for step in steps:
            target = folder_of(self.root, step)
            temporary = self.root / f"{target.name}.tmp-mirror"
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                remote_storage.download(self.place / target.name, temporary)
                reason = problem(temporary)
            except UserError as error:
                reason = str(error)
            if reason is None:
                shutil.rmtree(target, ignore_errors=True)  # a damaged one of this step
                temporary.replace(target)
                self.publish(Warned(message=f"the checkpoint of step {step:,} was copied from {self.place}"))
                return
            self.publish(Warned(message=f"passed over {self.place / target.name}: {reason}"))

    def start(self) -> None:
        """Start to copy, first what an earlier process may have left."""
        self._is_due.set()
        self._thread.start()

    def notice(self, event: object) -> None:
        if isinstance(event, CheckpointSaved):
            self._is_due.set()
        elif isinstance(event, StepDone):
            self._report()

    def close(self) -> None:
        """Wait until the last checkpoint is copied."""
        self._is_over = True
        self._is_due.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._report()

    def remove_later(self, step: int) -> None:
        """Delete checkpoints of later steps, as on disk: nothing may resume from them."""
        self._last_step = step
        self._is_due.set()

    def _report(self) -> None:
        while self._problems:
            self.publish(Warned(message=self._problems.pop(0)))

    def _run(self) -> None:
        while True:
            self._is_due.wait()
            self._is_due.clear()
            is_last = self._is_over
            try:
                self._synchronize()
            except (UserError, OSError) as error:
                self._problems.append(f"the checkpoints could not be copied to {self.place}: {error}")
            if is_last:
                return

    def _synchronize(self) -> None:
        """Copy the checkpoints that are not at the place, newest first; then delete there what is gone from disk."""
        there = _steps(self.place)
        for folder in listed(self.root):
            if step_of(folder) not in there or not self._is_copied(folder):
                self._copy(folder)
                if self._is_due.is_set() and not self._is_over:
                    return  # there is a newer one
        kept = {folder.name for folder in listed(self.root)}
        for name in {name.partition("/")[0] for name in remote_storage.listed(self.place)}:
            is_checkpoint = name.startswith("step-") and name[5:].isdecimal()
            if is_checkpoint and ((kept and name not in kept) or int(name[5:]) > self._last_step):
                _remove(self.place / name)

    def _is_copied(self, folder: Path) -> bool:
        """Return whether the copy of this step is this checkpoint, not one from before a return to an earlier step."""
        with suppress(FileNotFoundError):  # deleted just now
            return (folder / MANIFEST).read_bytes() == remote_storage.read(self.place / folder.name / MANIFEST)
        return True

    def _copy(self, folder: Path) -> None:
        """Copy a checkpoint through hard links, since the run may delete it meanwhile."""
        links, target = self.root / f"{LINKS}{folder.name}", self.place / folder.name
        shutil.rmtree(links, ignore_errors=True)
        links.mkdir()
        try:
            with suppress(FileNotFoundError):  # deleted just now
                names = sorted(read_manifest(folder).files)
                for name in (*names, MANIFEST):
                    _link_or_copy(folder / name, links / name)
                _remove(target)
                remote_storage.upload(links, target, names)
                remote_storage.upload(links, target, [MANIFEST])
        finally:
            shutil.rmtree(links, ignore_errors=True)


def _steps(place: RemotePath) -> set[int]:
    """Return the steps of the complete checkpoints at a place."""
    parts = [name.split("/") for name in remote_storage.listed(place)]
    return {
        int(folder[5:])
        for folder, *rest in parts
        if rest == [MANIFEST] and folder.startswith("step-") and folder[5:].isdecimal()
    }


def _remove(place: RemotePath) -> None:
    """Delete a copy, its manifest first: without it, the rest is no checkpoint."""
    names = remote_storage.listed(place)
    remote_storage.remove(place, [name for name in names if name == MANIFEST])
    remote_storage.remove(place, [name for name in names if name != MANIFEST])


def _link_or_copy(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except OSError:  # a file system without links; a missing file is one for the copy, too
        shutil.copy(file, link)
