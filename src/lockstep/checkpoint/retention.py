"""Which checkpoints stay: the newest few, the best, one every few hours; the only good one is never deleted."""

import shutil
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

from lockstep.checkpoint.layout import CheckpointSection, Manifest, listed, read_manifest
from lockstep.checkpoint.verify import problem

LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer", "brier", "ece")
"""Metrics whose name ends in one of these are better when smaller."""


def is_better(metric: str, new: float, old: float | None) -> bool:
    """Whether a metric's new value beats the old one; the first one always does, NaN never."""
    if new != new:
        return False
    if old is None:
        return True
    return new < old if metric.endswith(LOWER_IS_BETTER) else new > old


def manifests(root: Path) -> dict[Path, Manifest]:
    """Every finished checkpoint with its manifest, newest first; those whose manifest cannot be read are left out."""
    found = {}
    for folder in listed(root):
        with suppress(OSError, ValueError):
            found[folder] = read_manifest(folder)
    return found


def best(there: dict[Path, Manifest], metric: str) -> Path | None:
    """The checkpoint with the best value of a metric (the older one of equals), or None when none has it."""
    found: tuple[float, Path] | None = None
    for folder, manifest in reversed(there.items()):
        value = manifest.metrics.get(metric)
        if value is not None and is_better(metric, value, found[0] if found else None):
            found = value, folder
    return found[1] if found else None


def spaced(there: dict[Path, Manifest], hours: float) -> list[Path]:
    """The oldest checkpoint, then always the first that was saved so many hours after the one before."""
    kept: list[Path] = []
    for folder, manifest in reversed(there.items()):
        if not kept or manifest.saved_at - there[kept[-1]].saved_at >= hours * 3600:
            kept.append(folder)
    return kept


def chosen(root: Path, section: CheckpointSection) -> Path | None:
    """The checkpoint that a finished run stands for: the best whole one if it keeps one, else the newest."""
    champion = best(manifests(root), section.best) if section.best else None
    candidates = [champion, *listed(root)] if champion else listed(root)
    return next((folder for folder in candidates if problem(folder) is None), None)


def tidy(root: Path, section: CheckpointSection, just_saved: Path | None = None) -> None:
    """Delete what is to be kept for no reason, and what killed saves have left behind.

    A run that has passed over damaged checkpoints saves older steps than theirs, so the newest ones are checked until
    one is whole (in a sound run the first, just written); as long as none is, nothing is deleted.
    """
    folders, there = listed(root), manifests(root)
    whole = list(dropwhile(problem, folders))
    stay = {*whole[: section.keep], *([just_saved] if just_saved else [])}
    if section.best and (champion := best(there, section.best)):
        stay.add(champion)
    if section.keep_every_hours:
        stay.update(spaced(there, section.keep_every_hours))
    for folder in folders if whole else []:
        if folder not in stay:
            remove(folder)
    for leftover in root.glob("step-*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint: what is half deleted has another name, so that it is never taken for a damaged one."""
    doomed = folder.with_name(f"{folder.name}.tmp-deleted")
    with suppress(OSError):
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
