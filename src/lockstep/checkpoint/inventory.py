"""Which checkpoints a run has: how big, how old and how good each is, what it is kept for, and whether it is whole."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import retention, verify
from lockstep.checkpoint.layout import MANIFEST, CheckpointSection, Manifest, listed, read_manifest


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint as it lies on disk."""

    folder: Path
    manifest: Manifest | None
    """None when it cannot be read; `problem` says why."""
    kept_for: Sequence[str]
    problem: str | None
    """What is wrong with it, in a few words."""
    is_verified: bool
    """Whether every byte was read, or only the manifest and the sizes of the files."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What is in a run's folder of checkpoints."""

    entries: Sequence[Entry]
    """The checkpoints that were asked for, newest first."""
    resumed: Path | None
    """The one that `--resume auto` would take, as far as `is_certain`."""
    is_certain: bool
    """Whether every byte of that one was read: sizes alone may be right in a damaged one."""
    num_finished: int
    """How many there are from which a run could be resumed if they are whole."""
    set_aside: Sequence[int] = ()
    """Bytes of each checkpoint that a run has set aside when it went back to an older one."""
    unfinished: Sequence[int] = ()
    """Bytes of each folder that is no checkpoint yet, or no more: what kills have left, or a save under way."""


def look(
    root: Path,
    section: CheckpointSection,
    *,
    every_byte: bool = False,
    only: Path | None = None,
    reading: Callable[[Path], None] = lambda _: None,
) -> Inventory:
    """Take stock of a run's folder of checkpoints, or of `only` one in it; `reading` is told each before it is checked.

    The run may go on meanwhile: what it deletes while it is looked at is left out. Raises CheckpointError when the
    folder cannot be read.
    """
    try:
        with suppress(FileNotFoundError):
            os.listdir(root)  # a glob takes a folder that may not be read for an empty one
        folders, problems = listed(root), {}
        for folder in dict.fromkeys([*folders, *([only] if only else [])]):
            reading(folder)
            is_asked = every_byte and only in (None, folder)
            problems[folder] = verify.problem(folder, every_byte=is_asked)
        manifests = retention.manifests(root)
        there = {folder: problem for folder, problem in problems.items() if (folder / MANIFEST).is_file()}
        set_aside, unfinished = ([weight(f) for f in root.glob(each)] for each in ("set-aside-*", "step-*.tmp-*"))
    except OSError as error:
        raise CheckpointError(f"cannot look at the checkpoints in {root}: {error.strerror}") from None
    finished = {folder: there[folder] for folder in folders if folder in there}
    reasons = _reasons(finished, manifests, section)
    resumed = next(dropwhile(finished.get, finished), None)
    return Inventory(
        entries=[
            Entry(
                folder=folder,
                manifest=manifests.get(folder) or _manifest(folder),
                kept_for=reasons.get(folder, ["set aside" if folder.name.startswith("set-aside-") else "nothing"]),
                problem=problem,
                is_verified=every_byte,
            )
            for folder, problem in there.items()
            if only in (None, folder)
        ],
        resumed=resumed,
        is_certain=resumed is None or (every_byte and only in (None, resumed)),
        num_finished=len(finished),
        set_aside=set_aside if only is None else (),
        unfinished=unfinished if only is None else (),
    )


def _reasons(
    finished: Mapping[Path, str | None], manifests: Mapping[Path, Manifest], section: CheckpointSection
) -> dict[Path, list[str]]:
    """Checkpoint -> why `keeper.tidy` leaves it where it is; `finished`, newest first, says what is wrong with each."""
    known = {folder: manifests[folder] for folder in finished if folder in manifests}
    whole = list(dropwhile(finished.get, finished))
    reasons: dict[Path, list[str]] = {folder: [] for folder in finished}
    for folder in whole[: section.keep]:
        reasons[folder].append("newest")
    if section.best and (champion := retention.best(known, section.best)):
        reasons[champion].append("best")
    if section.keep_every_hours:
        for folder in retention.spaced(known, section.keep_every_hours):
            reasons[folder].append(f"every {section.keep_every_hours:g} h")
    return {folder: found or ["nothing" if whole else "lack of a whole one"] for folder, found in reasons.items()}


def _manifest(folder: Path) -> Manifest | None:
    with suppress(OSError, ValueError):
        return read_manifest(folder)
    return None


def weight(folder: Path) -> int:
    """Bytes of all files in a folder; what vanishes meanwhile has none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
