"""The checkpoints of a run: size, age, metrics, why each is kept, and whether it is intact."""

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
    """A checkpoint on disk."""

    folder: Path
    manifest: Manifest | None
    """None when it cannot be read; see `problem`."""
    kept_for: Sequence[str]
    problem: str | None
    """What is wrong with it, in a few words; None when nothing is."""
    is_verified: bool
    """Whether every byte was read, not only the manifest and the files' sizes."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """A run's folder of checkpoints."""

    entries: Sequence[Entry]
    """The requested checkpoints, newest first."""
    resumed: Path | None
    """The one that `--resume auto` would load."""
    is_certain: bool
    """Whether every byte of that one was read."""
    num_finished: int
    """How many could be resumed from if they are intact."""
    set_aside: Sequence[int] = ()
    """Bytes of each checkpoint that was set aside when the run resumed from an older one."""
    unfinished: Sequence[int] = ()
    """Bytes of each temporary folder: of killed saves, or of one in progress."""


def take_inventory(
    root: Path,
    section: CheckpointSection,
    *,
    every_byte: bool = False,
    only: Path | None = None,
    on_check: Callable[[Path], None] = lambda _: None,
) -> Inventory:
    """Check a run's folder of checkpoints, or `only` one in it; `on_check` is called with each before it is checked.

    The run may continue meanwhile: checkpoints that it deletes are left out. Raises CheckpointError when the folder
    cannot be read.
    """
    try:
        with suppress(FileNotFoundError):
            os.listdir(root)  # glob() ignores that a folder cannot be read
        folders, problems = listed(root), {}
        for folder in dict.fromkeys([*folders, *([only] if only else [])]):
            on_check(folder)
            problems[folder] = verify.problem(folder, every_byte=every_byte and only in (None, folder))
        manifests = retention.manifests(root)
        existing = {folder: problem for folder, problem in problems.items() if (folder / MANIFEST).is_file()}
        set_aside, unfinished = ([folder_bytes(f) for f in root.glob(each)] for each in ("set-aside-*", "step-*.tmp-*"))
    except OSError as error:
        raise CheckpointError(f"cannot look at the checkpoints in {root}: {error.strerror}") from None
    finished = {folder: existing[folder] for folder in folders if folder in existing}
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
            for folder, problem in existing.items()
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
    """Checkpoint -> why `retention.tidy` keeps it; `finished`: checkpoint -> its problem, newest first."""
    known = {folder: manifests[folder] for folder in finished if folder in manifests}
    intact = list(dropwhile(finished.get, finished))
    reasons = retention.reasons(intact, known, section)
    return {folder: reasons.get(folder) or ["nothing" if intact else "lack of a whole one"] for folder in finished}


def _manifest(folder: Path) -> Manifest | None:
    with suppress(OSError, ValueError):
        return read_manifest(folder)
    return None


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; files that are deleted meanwhile count 0."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(path, name)).st_size
    return total
