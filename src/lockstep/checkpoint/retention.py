"""Retention of checkpoints: the newest few, the best, one every few hours; the only intact one is never deleted."""

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

from lockstep.checkpoint.layout import CheckpointSection, Manifest, listed, read_manifest
from lockstep.checkpoint.metric_modes import is_better
from lockstep.checkpoint.verify import problem


def manifests(root: Path) -> dict[Path, Manifest]:
    """Read the manifests of finished checkpoints that are readable, newest first."""
    readable = {}
    for folder in listed(root):
        with suppress(OSError, ValueError):
            readable[folder] = read_manifest(folder)
    return readable


def best(manifests: Mapping[Path, Manifest], section: CheckpointSection) -> Path | None:
    """Return the checkpoint with the best value of checkpoint.best (the oldest of equals); None when none has it."""
    if section.best is None:
        return None
    champion: tuple[float, Path] | None = None
    for folder, manifest in reversed(list(manifests.items())):
        value = manifest.metrics.get(section.best)
        if value is not None and is_better(section.best, value, champion[0] if champion else None, mode=section.mode):
            champion = value, folder
    return champion[1] if champion else None


def spaced(manifests: Mapping[Path, Manifest], hours: float) -> list[Path]:
    """List the oldest checkpoint, then each first one that was saved at least so many hours after the one before."""
    kept: list[Path] = []
    for folder, manifest in reversed(list(manifests.items())):
        if not kept or manifest.saved_at - manifests[kept[-1]].saved_at >= hours * 3600:
            kept.append(folder)
    return kept


def reasons(
    intact: Sequence[Path], readable: Mapping[Path, Manifest], section: CheckpointSection
) -> dict[Path, list[str]]:
    """Return checkpoint -> why it is kept; `intact`: the newest that is whole and all older ones, newest first."""
    found = defaultdict[Path, list[str]](list)
    for folder in intact[: section.keep]:
        found[folder].append("newest")
    if champion := best(readable, section):
        found[champion].append("best")
    if section.keep_every_hours:
        for folder in spaced(readable, section.keep_every_hours):
            found[folder].append(f"every {section.keep_every_hours:g} h")
    return found


def chosen(root: Path, section: CheckpointSection) -> Path | None:
    """Return the checkpoint to evaluate and export: the best (checkpoint.best) if intact, or the newest intact one."""
    champion = best(manifests(root), section)
    candidates = [champion, *listed(root)] if champion else listed(root)
    return next((folder for folder in candidates if problem(folder) is None), None)


def tidy(root: Path, section: CheckpointSection, just_saved: Path | None = None) -> None:
    """Delete checkpoints that nothing keeps, and leftovers of killed saves.

    A run that resumed before damaged checkpoints saves earlier steps than theirs, so the newest ones are checked until
    one is intact (usually the first, just written). While none is, nothing is deleted.
    """
    leftovers = list(root.glob("step-*.tmp-*"))  # now: a next save may begin while checkpoints are checked
    folders, readable = listed(root), manifests(root)
    intact = list(dropwhile(problem, folders))
    kept = reasons(intact, readable, section)
    for folder in folders if intact else []:
        if folder not in kept and folder != just_saved:
            remove(folder)
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint, after renaming it, so that a half-deleted one is never taken for a damaged one."""
    doomed = folder.with_name(f"{folder.name}.tmp-deleted")
    with suppress(OSError):
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
